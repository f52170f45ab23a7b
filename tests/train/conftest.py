"""A tiny real target in a folder, rows of random tokens, and runs over them."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.data.target import Target
from outrider.scripts import cli
from outrider.train.eagle import main

VOCAB, TOKENIZER = 128, 97
Rows = list[dict[str, object]]


def write_target(folder: Path, tokenizer_size: int, **config: Any) -> Path:
    """A tied Llama of 8 layers with its tokenizer; ids past the tokenizer are padding rows."""
    torch.manual_seed(0)
    known = {"num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1}
    model = LlamaForCausalLM(LlamaConfig(**known, **ends, **config))
    with torch.no_grad():  # padding rows that are never the likeliest, as in a trained model
        model.model.embed_tokens.weight[tokenizer_size:] *= 0.01
    model.save_pretrained(folder)
    words = {"<s>": 0, "</s>": 1} | {f"w{index}": index for index in range(2, tokenizer_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hidden size 32, with padding rows past its tokenizer."""
    return write_target(
        tmp_path_factory.mktemp("target"),
        TOKENIZER,
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        max_position_embeddings=128,
        initializer_range=0.3,
    )


@pytest.fixture(scope="session")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 32 channels that turn slowly: wide enough for token codes."""
    return write_target(
        tmp_path_factory.mktemp("wide"),
        VOCAB,
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=96,
        rope_theta=1e6,
        max_position_embeddings=256,
        initializer_range=0.1,
    )


def random_rows(seed: int, lengths: list[int], *, low: int = 2, high: int = 60) -> Rows:
    """Rows of random tokens whose answers take about half."""
    made = torch.Generator().manual_seed(seed)
    rows: Rows = []
    for number, length in enumerate(lengths):
        ids = torch.randint(low, high, (length,), generator=made).tolist()
        cut = int(torch.randint(2, max(3, length - 1), (1,), generator=made))
        rows.append(
            {"id": f"r{number}", "input_ids": ids, "loss_mask": [0] * cut + [1] * (length - cut)}
        )
    return rows


def write_rows(path: Path, rows: Rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def rows_file(tmp_path: Path) -> Path:
    """28 rows that pack into 7 of 64 positions or so."""
    return write_rows(tmp_path / "rows.jsonl", random_rows(1, [16, 12, 20, 9] * 7))


@pytest.fixture
def unlike_rows(tmp_path: Path) -> Path:
    """18 rows that fill a pack of 40 each, with 1 to 31 supervised tokens."""
    supervised = [17, 3, 9, 30, 2, 12, 25, 7, 1, 19, 5, 28, 14, 4, 22, 8, 2, 31]
    rows = random_rows(2, [36] * 18)
    for row, count in zip(rows, supervised, strict=True):
        row["loss_mask"] = [0] * (36 - count) + [1] * count
    return write_rows(tmp_path / "unlike.jsonl", rows)


@pytest.fixture
def one_row(tmp_path: Path) -> Path:
    """A single row."""
    return write_rows(tmp_path / "one.jsonl", random_rows(3, [40]))


@pytest.fixture
def heldout_file(tmp_path: Path, target_folder: Path) -> Path:
    """Prompts that the target itself answered greedily."""
    target = Target.load(str(target_folder))
    rows: Rows = []
    for number, row in enumerate(random_rows(9, [8] * 10)):
        ids = torch.tensor([row["input_ids"]])
        for _ in range(12):
            last = target.logits(target.run(ids).last_BTH[:, -1])
            ids = torch.cat([ids, last.argmax(-1, keepdim=True)], dim=1)
        whole = ids[0].tolist()
        fields: dict[str, object] = {"id": f"h{number}", "kind": "random", "temperature": 0.0}
        fields |= {"prompt_ids": whole[:8], "answer_ids": whole[8:]}
        rows.append(fields)
    return write_rows(tmp_path / "heldout.jsonl", rows)


@pytest.fixture
def train(tmp_path: Path, target_folder: Path, rows_file: Path) -> Callable[..., Path]:
    """Runs main with the tiny target; returns the output folder."""

    def run(*flags: str, output: str = "run", data: Path = rows_file) -> Path:
        folder = tmp_path / output
        given = {
            "target": target_folder,
            "data": data,
            "output": folder,
            "device": "cpu",
            "max-length": 64,
            "unroll-steps": 2,
            "lr": 3e-3,
            "log-every": 3,
        }
        main([*(word for name in given for word in (f"--{name}", str(given[name]))), *flags])
        return folder

    return run


class Checked(NamedTuple):
    """What `outrider check` said."""

    code: int
    said: str
    found: dict[str, Any]
    record: dict[str, Any]

    @property
    def wrong(self) -> list[str]:
        """Names of what failed."""
        return [name for name, one in self.found.items() if one.verdict == "fail"]


@pytest.fixture
def check(
    tmp_path: Path, target_folder: Path, rows_file: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Checked]:
    def run(*flags: str, target: Path = target_folder, data: Path = rows_file) -> Checked:
        path = tmp_path / "check.json"
        path.unlink(missing_ok=True)
        given = ["--target", target, "--data", data, "--device", "cpu", "--max-length", "64"]
        capsys.readouterr()
        code = 0
        try:
            cli.main(["check", *map(str, given), "--json", str(path), *flags])
        except SystemExit as caught:
            code = int(caught.code or 0)
        said = capsys.readouterr()
        record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        found = {one["name"]: SimpleNamespace(**one) for one in record.get("findings", [])}
        return Checked(code, said.out + said.err, found, record)

    return run


@pytest.fixture
def spoil() -> Callable[[Path, Callable[[dict[str, torch.Tensor]], None]], None]:
    """Changes weights of a model or an exported head."""

    def run(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    return run
