"""Tiny tokenizers with awkward chat templates, and tiny targets built from configs."""

import functools
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from outrider.data.target import Target
from outrider.data.template import Template
from outrider.scripts import cli

TEXT = [
    "user assistant system tool The capital of France is Paris, and two plus two makes four.",
    "Tell me a story about a fox. What is the time? Thinking first, then the answer: yes, no.",
    "<think> think </think> Hello there, how are you today? I am fine. Write a short line of code.",
]
MESSAGE = "{{ '<|turn|>' + message['role'] + '\n' + message['content'] + '<|end|>\n' }}"
ASK = "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
TEMPLATES = {
    "chatml": "{% for message in messages %}" + MESSAGE + "{% endfor %}" + ASK,
    "strict": (
        "{{ bos_token }}{% for message in messages %}"
        "{% if message['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}" + MESSAGE + "{% endfor %}" + ASK
    ),
    "strips_earlier_thinking": (
        "{% for message in messages %}{% set text = message['content'] %}"
        "{% if message['role'] == 'assistant' and not loop.last %}"
        "{% set text = text.split('</think>')[-1] %}{% endif %}"
        "{{ '<|turn|>' + message['role'] + '\n' + text + '<|end|>\n' }}{% endfor %}" + ASK
    ),
    "strips_all_thinking": (
        "{% for message in messages %}"
        "{{ '<|turn|>' + message['role'] + '\n' + message['content'].split('</think>')[-1]"
        " + '<|end|>\n' }}{% endfor %}" + ASK
    ),
    "opens_thinking": (
        "{% for message in messages %}" + MESSAGE + "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|turn|>assistant\n<think>' }}{% endif %}"
    ),
    "tagged": (
        "{% for message in messages %}{% if message['role'] == 'assistant' %}"
        "{{ '<|turn|>assistant\n' }}{% generation %}{{ message['content'] }}{% endgeneration %}"
        "{{ '<|end|>\n' }}{% else %}" + MESSAGE + "{% endif %}{% endfor %}" + ASK
    ),
    "tags_the_user": (
        "{% for message in messages %}{% if message['role'] == 'user' %}"
        "{{ '<|turn|>user\n' }}{% generation %}{{ message['content'] }}{% endgeneration %}"
        "{{ '<|end|>\n' }}{% else %}" + MESSAGE + "{% endif %}{% endfor %}" + ASK
    ),
    "tools": (
        "{% if tools %}{{ '<|turn|>system\n' + (tools | tojson) + '<|end|>\n' }}{% endif %}"
        "{% for message in messages %}{{ '<|turn|>' + message['role'] + '\n' }}"
        "{% if message.reasoning_content %}"
        "{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}"
        "{{ message['content'] or '' }}{% for call in message.tool_calls or [] %}"
        "{{ '<call>' + (call.function | tojson) + '</call>' }}{% endfor %}"
        "{{ '<|end|>\n' }}{% endfor %}" + ASK
    ),
    "modal": (
        "{% if mode is defined %}{{ '<|turn|>mode ' + mode + '<|end|>\n' }}{% endif %}"
        "{% for message in messages %}" + MESSAGE + "{% endfor %}" + ASK
    ),
    "dated": (
        "{{ strftime_now('%Y') + '\n' }}"
        "{% for message in messages %}" + MESSAGE + "{% endfor %}" + ASK
    ),
    "plain_text": ("{% for message in messages %}{{ message['content'] + '\n' }}{% endfor %}"),
}


@functools.cache
def trained_tokenizer() -> str:
    """A byte-level BPE of 400 tokens as JSON."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|start|>", "<|turn|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 4, trainer)
    return tokenizer.to_str()


def tokenizer_with(template: str | None = "chatml") -> PreTrainedTokenizerFast:
    """Pad, end of text and turn end are one token, as in many chat models."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(trained_tokenizer()),
        bos_token="<|start|>",
        eos_token="<|end|>",
        pad_token="<|end|>",
        chat_template=None if template is None else TEMPLATES[template],
    )


SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


def model_of(family: str = "llama", vocab_size: int = 400, **changes):
    """TinyLlama (tied), TinyQwen (own head size, untied), TinyGemma (window, soft cap, scale)."""
    torch.manual_seed(3)
    shape = SHAPE | {"vocab_size": vocab_size} | changes
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True))
    if family == "qwen":
        return Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=16, tie_word_embeddings=False))
    return Gemma2ForCausalLM(
        Gemma2Config(
            **shape,
            head_dim=8,
            query_pre_attn_scalar=8,
            sliding_window=8,
            final_logit_softcapping=5.0,
            attn_logit_softcapping=20.0,
        )
    )


def target_with(template: str | None = "chatml", family: str = "llama", **changes) -> Target:
    tokenizer = None if template is None else tokenizer_with(template)
    return Target.from_model(model_of(family, **changes), tokenizer, name=f"tiny-{family}")


@pytest.fixture(scope="session")
def target() -> Target:
    """TinyLlama with a ChatML-like template."""
    return target_with()


@pytest.fixture(scope="session")
def trained() -> str:
    """The tokenizer alone, to be given special tokens and a template."""
    return trained_tokenizer()


@pytest.fixture(scope="session")
def template_of(trained):
    """The template of a family in templates/, with its special tokens."""
    folder = Path(__file__).parent / "templates"
    families = yaml.safe_load((folder / "families.yaml").read_text(encoding="utf-8"))

    def make(family, options=None):
        facts = families[family]
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(trained),
            bos_token=facts.get("bos"),
            eos_token=facts["stops"][0],
            additional_special_tokens=facts["stops"] + facts.get("special", []),
            chat_template=(folder / f"{family}.jinja").read_text(encoding="utf-8"),
        )
        eos_ids = tuple(tokenizer.convert_tokens_to_ids(facts["stops"]))
        return Template(tokenizer=tokenizer, eos_ids=eos_ids, options=options or {})

    return make


@pytest.fixture(scope="session")
def make_tokenizer():
    return tokenizer_with


@pytest.fixture(scope="session")
def make_model():
    return model_of


@pytest.fixture(scope="session")
def make_target():
    return target_with


SMALL = ["--head-intermediate", "32", "--unroll-steps", "2", "--device", "cpu"]
SMALL += ["--max-length", "256"]


@pytest.fixture
def check(tmp_path, capsys, make_model, make_tokenizer):
    """Runs `outrider check`: its exit code, its page, its findings by name."""

    def run(rows, *flags, template="chatml", layers=("1", "3", "5"), **model):
        folder = tmp_path / "target"
        make_model(**model).save_pretrained(folder)
        make_tokenizer(template).save_pretrained(folder)
        data = tmp_path / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        given = ["check", "--target", str(folder), "--data", str(data), *SMALL]
        given += ["--aux-layers", *layers] if layers else []
        given += ["--json", str(tmp_path / "check.json"), *flags]
        capsys.readouterr()
        try:
            cli.main(given)
            code = 0
        except SystemExit as caught:
            code = caught.code
        said = capsys.readouterr()
        if code == 2:
            return SimpleNamespace(code=code, page=said.out, error=said.err)
        record = json.loads((tmp_path / "check.json").read_text())
        found = {one["name"]: SimpleNamespace(**one) for one in record["findings"]}
        return SimpleNamespace(code=code, page=said.out, found=found, record=record, data=data)

    return run


FORKS = """
import os, sys, traceback
{preamble}
print("ready", flush=True)
for line in sys.stdin:
    word, *rest = line.split()
    if word == "start":
        child = os.fork()
        if child == 0:
            code = 1
            try:
                job(*rest)
                code = 0
            except SystemExit as stop:
                code = stop.code
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        print(child, flush=True)
    else:
        print(os.waitstatus_to_exitcode(os.waitpid(int(rest[0]), 0)[1]), flush=True)
"""


class Forks:
    """Runs `job(*words)` in processes of their own, to be killed; torch is imported only once."""

    def __init__(self, preamble):
        self.process = subprocess.Popen(
            [sys.executable, "-c", FORKS.replace("{preamble}", preamble)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout.readline() == "ready\n"

    def _ask(self, words):
        self.process.stdin.write(words + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def start(self, *words):
        """The process id of a job that runs now."""
        return self._ask(" ".join(["start", *map(str, words)]))

    def end(self, child):
        """The exit code of a job, minus the signal where one ended it."""
        return self._ask(f"wait {child}")

    def run(self, *words):
        return self.end(self.start(*words))

    def close(self):
        self.process.stdin.close()
        self.process.wait(timeout=30)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def make_forks():
    made = []

    def make(preamble):
        made.append(Forks(preamble))
        return made[-1]

    yield make
    for forks in made:
        forks.close()
