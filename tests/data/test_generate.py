"""Answers equal plain decoding row by row, whatever the batch; stopped runs go on; messages."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import version

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.data import generate as generate_module
from outrider.data.answers import Answer, Decoding, Request, prompt_ids, template_of
from outrider.data.demo.conversations import demo_requests
from outrider.data.generate import generate, generate_files
from outrider.data.local_answers import LocalAnswers, answers
from outrider.data.manifest import count, manifest_path, tokenizer_hash
from outrider.data.penalties import Prefix
from outrider.data.prompts import mix_temperatures, parse_temperatures
from outrider.data.rowfile import PartialRows
from outrider.data.sampling import Sampling, Stream, draw, process, row_key, uniform
from outrider.data.sources import records
from outrider.data.target import Target
from outrider.data.template import template_hash
from outrider.scripts.generate_command import main

EOS = [5, 9, 17]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_p=0.8, repetition_penalty=1.3),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny target in float64 with three end tokens, as files."""
    path = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.4,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).double()
    model.generation_config.eos_token_id = EOS
    model.save_pretrained(path)
    words = {f"w{token}": token for token in range(95)} | {"user": 95, "assistant": 96}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w3", eos_token="w5", chat_template=TEMPLATE
    )
    fast.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def target(folder):
    return Target.load(str(folder), dtype=torch.float64)


def requests(num=14):
    made = []
    for index in range(num):
        content = " ".join(f"w{(7 * index + 3 * step) % 95}" for step in range(1 + 5 * index % 11))
        messages = [{"role": "user", "content": content}]
        sampling = SAMPLINGS[index % len(SAMPLINGS)]
        made.append(Request(f"r{index}", messages, sampling, {"kind": f"k{index % 2}"}))
    return made


def answered(target, asked, **settings):
    pairs = list(zip(asked, prompt_ids(target, asked), strict=True))
    found = answers(target, pairs, Decoding(max_new_tokens=20, **settings))
    return {answer.request.id: answer for answer in found}


def by_hand(target, request, ids, seed):
    """One row, one token at a time, no cache, no batch."""
    path = list(ids)
    while len(path) < len(ids) + 20:
        with torch.no_grad():
            logits_V = target.model(input_ids=torch.tensor([path]), use_cache=False).logits[0, -1]
        probs_V = process(logits_V[None], request.sampling, [Prefix(path, len(ids))])[0]
        coin = uniform(seed, row_key(request.id), len(path), Stream.TARGET)
        path.append(draw(probs_V, coin))
        if path[-1] in EOS:
            break
    return path[len(ids) :]


def test_answers_are_plain_decoding_row_by_row(target):
    asked = requests()
    found = answered(target, asked, batch_size=4, seed=3)
    assert len(found) == len(asked)
    for request, ids in zip(asked, prompt_ids(target, asked), strict=True):
        answer = found[request.id]
        assert answer.prompt_ids == ids
        assert answer.answer_ids == by_hand(target, request, ids, seed=3)
        assert answer.finish == ("stop" if answer.answer_ids[-1] in EOS else "length")
        assert len(answer.answer_ids) == 20 or answer.finish == "stop"
        assert not set(answer.answer_ids[:-1]) & set(EOS)
    assert {answer.finish for answer in found.values()} == {"stop", "length"}
    assert len({answer.answer_ids[-1] for answer in found.values()} & set(EOS)) > 1


def test_greedy_answers_are_those_of_transformers(target):
    asked = [request._replace(sampling=Sampling()) for request in requests()]
    found = answered(target, asked, batch_size=5)
    for request, ids in zip(asked, prompt_ids(target, asked), strict=True):
        theirs = target.model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            do_sample=False,
            max_new_tokens=20,
        )
        assert found[request.id].answer_ids == theirs[0, len(ids) :].tolist()


def test_ids_that_the_tokenizer_cannot_make_are_never_drawn(make_target):
    """Rows of the output head beyond the tokenizer's are padding: no text holds them."""
    padded = make_target(vocab_size=800)
    size = padded.tokenizer_size
    ask = [{"role": "user", "content": "Hello"}]
    warm = Sampling(temperature=2.0, repetition_penalty=1.2)
    for sampling in (warm, Sampling(temperature=2.0), Sampling()):
        asked = [Request(f"r{number}", ask, sampling, {}) for number in range(8)]
        found = answered(padded, asked, batch_size=3)
        assert sum(len(one.answer_ids) for one in found.values()) > 20
        assert max(token for one in found.values() for token in one.answer_ids) < size
    for name, one in found.items():  # greedy: the likeliest of the ids there are, at each place
        path = list(one.prompt_ids)
        for token in one.answer_ids:
            with torch.no_grad():
                logits_V = padded.model(input_ids=torch.tensor([path])).logits[0, -1]
            assert token == int(logits_V[:size].argmax()), name
            path.append(token)


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_answers_do_not_depend_on_batch_or_order(target, batch_size):
    whole = answered(target, requests(), batch_size=4)
    again = answered(target, requests()[::-1], batch_size=batch_size)
    assert again == whole


def test_the_seed_and_the_id_change_sampled_answers_only(target):
    whole = answered(target, requests())
    other = answered(target, requests(), seed=1)
    renamed = answered(target, [r._replace(id=f"{r.id}-b") for r in requests()])
    for request in requests():
        ids = whole[request.id].answer_ids
        is_same = request.sampling.is_greedy or len(ids) < 4
        assert (other[request.id].answer_ids == ids) is is_same or len(ids) < 4
        assert (renamed[f"{request.id}-b"].answer_ids == ids) is is_same or len(ids) < 4


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.xz"])
def test_rows_are_written_in_the_order_asked(target, tmp_path, suffix):
    out = tmp_path / f"rows{suffix}"
    written = generate(target, requests(), out, Decoding(max_new_tokens=20, batch_size=3, seed=3))
    rows = list(records(str(out)))
    assert [row["id"] for row in rows] == [f"r{index}" for index in range(14)]
    assert written[:4] == (14, sum(len(row["answer_ids"]) for row in rows), 14, False)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        out.name,
        f"{out.name}.manifest.json",
    ]
    answer = answered(target, requests()[1:2], seed=3)["r1"]
    assert rows[1] == {
        "id": "r1",
        "kind": "k1",
        "temperature": 1.0,
        "seed": 3,
        "messages": [
            *requests()[1].messages,
            {"role": "assistant", "content": target.tokenizer.decode(
                answer.answer_ids, skip_special_tokens=True)},
        ],
        "prompt_ids": answer.prompt_ids,
        "answer_ids": answer.answer_ids,
        "finish": answer.finish,
    }  # fmt: skip


def test_several_files_are_one_run(target, tmp_path):
    files = {tmp_path / "a" / "1.jsonl": requests(3), tmp_path / "2.jsonl.xz": requests(8)[3:]}
    decoding = Decoding(max_new_tokens=20)
    written = generate_files(target, files, LocalAnswers(target, decoding), decoding)
    rows = {path: list(records(str(path))) for path in files}
    assert [[row["id"] for row in several] for several in rows.values()] == [
        [request.id for request in several] for several in files.values()
    ]
    assert written.num_rows == 8
    assert not list(tmp_path.rglob("*.partial.jsonl"))


@pytest.mark.slow
@pytest.mark.parametrize("blow", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_run_goes_on_where_it_was(folder, tmp_path, capsys, blow):
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"id": r.id, "messages": r.messages} for r in requests(30)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out, whole = tmp_path / "rows.jsonl", tmp_path / "whole.jsonl"
    common = ["--target", str(folder), "--prompts", str(prompts), "--temperature", "0.9"]
    common += ["--batch-size", "2", "--max-new-tokens", "90"]
    partial = tmp_path / "rows.jsonl.partial.jsonl"
    run = subprocess.Popen(
        [sys.executable, "-m", "outrider.scripts.cli", "generate", *common, "--out", str(out)],
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    while not partial.exists() or partial.read_bytes().count(b"\n") < 5:
        assert run.poll() is None, run.stderr.read()
        time.sleep(0.02)
    run.send_signal(blow)
    _, stderr = run.communicate(timeout=60)
    if blow == signal.SIGINT:
        assert run.returncode == 130
        assert b"stopped; the same command continues" in stderr
    assert not out.exists()
    with partial.open("ab") as file:
        file.write(b'{"id": "r29", "prompt_i')
    num_done = partial.read_bytes().count(b"\n") - 2  # settings and the run come first
    with pytest.warns(UserWarning, match="1 damaged line left out"):
        main([*common, "--out", str(out)])
    assert f"{num_done} rows taken over from a stopped run" in capsys.readouterr().out
    main([*common, "--out", str(whole)])
    assert out.read_bytes() == whole.read_bytes()
    assert not partial.exists()


class OneThenStop(LocalAnswers):
    """Answers one prompt, then Ctrl-C."""

    def answer(self, prompts, emit):
        emit(next(answers(self.target, prompts, self.decoding)))
        raise KeyboardInterrupt


def test_a_begun_file_goes_on_with_the_same_settings_and_prompts_only(target, tmp_path):
    out, asked = tmp_path / "rows.jsonl", [r._replace(sampling=Sampling()) for r in requests(3)]
    decoding = Decoding(max_new_tokens=20)
    with pytest.raises(KeyboardInterrupt):
        generate_files(target, {out: asked}, OneThenStop(target, decoding), decoding)
    with pytest.raises(
        ValueError, match=r"begun with other settings \(max_new_tokens: 20, not 21\)"
    ):
        generate(target, asked, out, Decoding(max_new_tokens=21))
    with pytest.raises(
        ValueError, match=r"seed: 0, not 1\); go on with those, start again with over"
    ):
        generate(target, asked, out, Decoding(max_new_tokens=20, seed=1))
    warmer = [request._replace(sampling=SAMPLINGS[1]) for request in asked]
    with pytest.raises(ValueError, match=r"samplings: .*'temperature': 0\.0.*, not .*1\.0"):
        generate(target, warmer, out, decoding)
    changed = [asked[0]._replace(messages=[{"role": "user", "content": "w8"}]), *asked[1:]]
    with pytest.raises(ValueError, match=r"prompts: '3 by hash \w+', not '3 by hash \w+'"):
        generate(target, changed, out, decoding)
    assert generate(target, asked, out, decoding).num_new_rows == 2


def test_a_finished_file_is_left_alone_or_replaced_when_asked(target, tmp_path):
    out, asked, decoding = tmp_path / "rows.jsonl", requests(5), Decoding(max_new_tokens=20)
    first = generate(target, asked, out, decoding)
    content, manifest = out.read_bytes(), json.loads(manifest_path(out).read_text())
    again = generate(target, asked, out, decoding)
    assert again == first._replace(num_new_rows=0, was_finished=True)
    for other, message in [
        ((asked, Decoding(max_new_tokens=21)), "max_new_tokens: 20, not 21"),
        ((asked[:4], decoding), "prompts: '5 by hash"),
    ]:
        with pytest.raises(ValueError, match=f"{message}.*give overwrite to replace it, or name"):
            generate(target, other[0], out, other[1])
    assert out.read_bytes() == content
    out.write_bytes(content[:-9])
    with pytest.raises(ValueError, match="was changed after it was finished; give overwrite"):
        generate(target, asked, out, decoding)
    manifest_path(out).unlink()
    with pytest.raises(ValueError, match=r"is there without rows.jsonl.manifest.json"):
        generate(target, asked, out, decoding)
    local = LocalAnswers(target, decoding)
    generate_files(target, {out: asked}, local, decoding, overwrite=True)
    assert out.read_bytes() == content
    assert json.loads(manifest_path(out).read_text()) == manifest


def test_overwrite_begins_a_partial_file_of_other_settings_anew(target, tmp_path):
    out, asked, decoding = tmp_path / "rows.jsonl", requests(3), Decoding(max_new_tokens=20)
    with pytest.raises(KeyboardInterrupt):
        generate_files(target, {out: asked}, OneThenStop(target, decoding), decoding)
    other = Decoding(max_new_tokens=9)
    local = LocalAnswers(target, other)
    written = generate_files(target, {out: asked}, local, other, overwrite=True)
    assert written.num_new_rows == 3
    assert json.loads(manifest_path(out).read_text())["settings"]["max_new_tokens"] == 9


def test_the_manifest_says_what_a_file_was_made_with(target, tmp_path):
    out, asked = tmp_path / "rows.jsonl", requests(5)
    generate(target, asked, out, Decoding(max_new_tokens=20, seed=7))
    found, rows = json.loads(manifest_path(out).read_text()), list(records(str(out)))
    assert found["file"] == "rows.jsonl"
    assert found["sha256"] == hashlib.sha256(out.read_bytes()).hexdigest()
    assert found["runs"] == [{"outrider": version("outrider")}]
    settings = found["settings"]
    assert settings["target"] == target.fingerprint()[:16]
    assert settings["template"] == template_hash(target.tokenizer)
    assert (settings["by"], settings["dtype"]) == ("process", "torch.float64")
    assert (settings["seed"], settings["max_new_tokens"]) == (7, 20)
    assert settings["samplings"] == [
        {"rows": 2, "temperature": 0.0},
        {"rows": 1, "temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.3},
        {"rows": 2, "temperature": 1.0},
    ]
    finish = [row["finish"] for row in rows]
    assert found["counts"] == {
        "rows": 5,
        "answer_tokens": sum(len(row["answer_ids"]) for row in rows),
        "finish": {name: finish.count(name) for name in sorted(set(finish))},
        "temperature": {"0": 2, "0.7": 1, "1": 2},
        "retokenised": 0,
        "retokenised_to_other_ids": 0,
        # The end token w5 is found inside w51: this tokenizer cannot read its own words back.
        "text_gives_other_ids": sum("text_gives_other_ids" in row for row in rows),
    }


def test_the_tokenizer_hash_tells_vocabularies_apart_and_not_their_use(make_tokenizer):
    plain, other = make_tokenizer(), make_tokenizer()
    plain(["a", "a b c"], padding=True, truncation=True, max_length=5)
    assert tokenizer_hash(plain) == tokenizer_hash(other)
    other.add_tokens(["<|new|>"])
    assert tokenizer_hash(plain) != tokenizer_hash(other)


def test_a_row_says_when_its_text_gives_other_ids(make_target):
    target = make_target()
    asked = Request("r", [{"role": "user", "content": "Hello"}], Sampling(), {})
    (ids,) = prompt_ids(target, [asked])
    whole = target.tokenizer("the capital")["input_ids"]
    bytes_ = [target.tokenizer.convert_tokens_to_ids(letter) for letter in "the"]
    run = generate_module._Run(template_of(target, {}), Decoding(), {})
    same = generate_module._row(Answer(asked, ids, whole, "length"), run)
    other = generate_module._row(Answer(asked, ids, bytes_, "length"), run)
    assert "text_gives_other_ids" not in same
    assert other["text_gives_other_ids"] is True
    assert count([same, other])["text_gives_other_ids"] == 1


def test_two_runs_cannot_write_one_file(target, tmp_path):
    with (
        PartialRows(tmp_path / "rows.jsonl.partial.jsonl", {}),
        pytest.raises(ValueError, match="is being written by another run; wait for it"),
    ):
        generate(target, requests(2), tmp_path / "rows.jsonl", Decoding(max_new_tokens=4))


def test_messages_about_requests(target, tmp_path):
    out = tmp_path / "rows.jsonl"
    with pytest.raises(ValueError, match=r"3 requests share 2 ids; .* own id, not 'r0'"):
        generate(target, [*requests(2), requests(1)[0]], out, Decoding(max_new_tokens=4))
    with pytest.raises(ValueError, match=r"'r0' has 3 tokens and max_new_tokens is 128; the t"):
        generate(target, requests(1), out, Decoding())
    whole = target.tokenizer.chat_template
    try:
        target.tokenizer.chat_template = "user assistant "
        with pytest.raises(ValueError, match=r"'r0': message 0 \(user\) is left out by the chat"):
            generate(target, requests(1), out, Decoding(max_new_tokens=4))
    finally:
        target.tokenizer.chat_template = whole
    mute = Target.from_model(target.model)
    with pytest.raises(ValueError, match="target 'in-memory' has no tokenizer"):
        generate(mute, requests(1), out, Decoding())
    for name in ("max_new_tokens", "batch_size"):
        with pytest.raises(ValueError, match=f"{name} is 0; it must be at least 1"):
            Decoding(**{name: 0})
    assert not list(tmp_path.iterdir())


def test_temperatures_are_mixed_by_seed_and_id_alone():
    asked = [Request(f"r{n}", [], Sampling(top_p=0.9), {}) for n in range(3000)]
    shares = parse_temperatures("0=2,0.7=1,1=1")
    assert shares == {0.0: 0.5, 0.7: 0.25, 1.0: 0.25}
    assert parse_temperatures("0,1") == {0.0: 0.5, 1.0: 0.5}
    mixed = mix_temperatures(asked, shares, seed=3)
    found = [request.sampling.temperature for request in mixed]
    for temperature, share in shares.items():  # 5 standard deviations
        assert (
            abs(found.count(temperature) - 3000 * share) < 5 * (3000 * share * (1 - share)) ** 0.5
        )
    assert all(request.sampling.top_p == 0.9 for request in mixed)
    assert mix_temperatures(asked[::-1], shares, seed=3) == mixed[::-1]
    assert mix_temperatures(asked, shares, seed=4) != mixed
    for bad in ("", "0,", "a", "0,0", "-1", "0=0", "0=x", "1=inf", "nan"):
        with pytest.raises(ValueError, match="write each once, as 0,0"):
            parse_temperatures(bad)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--prompts", "x", "--temperatures", "0,1", "--temperature", "1"], "give one of them"),
        (["--prompts", "x", "--temperatures", "0,b"], "write each once"),
        (["--prompts", "x", "--server", "localhost:8000"], "give an address such as"),
        (["--prompts", "x", "--server", "http://me:secret@h/v1"], "OUTRIDER_API_KEY"),
        (["--prompts", "x", "--concurrency", "0"], "concurrency is 0; give a positive number"),
        ([], "give --prompts FILE or --demo"),
        (["--demo", "--prompts", "x.jsonl"], "give --prompts FILE or --demo"),
        (["--demo", "--top-k", "3"], "--demo brings its own temperatures"),
    ],
)
def test_the_command_says_what_it_needs(tmp_path, capsys, extra, message):
    with pytest.raises(SystemExit) as stop:
        main(["--target", "t", "--out", str(tmp_path / "rows.jsonl"), *extra])
    assert stop.value.code == 2
    assert message in " ".join(re.findall(r"[!-~]+", capsys.readouterr().err))


@pytest.mark.parametrize("split", ["heldout", "train"])
def test_the_demo_file_is_what_the_command_asks(split):
    rows = list(records({"heldout": "demo:heldout", "train": "demo"}[split]))
    asked = demo_requests(split, {"heldout": 24, "train": 520}[split])
    assert len(rows) == len(asked) == {"heldout": 288, "train": 3120}[split]
    for row, request in zip(rows, asked, strict=True):
        assert row["id"] == request.id
        assert row["messages"][:-1] == request.messages
        assert row["temperature"] == request.sampling.temperature
        assert {key: row[key] for key in request.extra} == request.extra
        assert (row["answer_ids"][-1] == 2) is (row["finish"] == "stop")
        assert 1 <= len(row["answer_ids"]) <= 128
        assert len(row["answer_ids"]) == 128 or row["finish"] == "stop"
    num_tokens = sum(len(row["answer_ids"]) for row in rows)
    assert num_tokens >= {"heldout": 25_000, "train": 260_000}[split]


@pytest.mark.slow
def test_the_demo_target_gives_the_demo_file():
    target = Target.load("smollm2-demo")
    rows = [row for row in records("demo:heldout") if row["kind"] in ("qa", "extract")][:16]
    asked = {request.id: request for request in demo_requests("heldout", 24)}
    chosen = [asked[row["id"]] for row in rows]
    ids = prompt_ids(target, chosen)
    assert ids == [row["prompt_ids"] for row in rows]
    found = answers(target, list(zip(chosen, ids, strict=True)), Decoding(batch_size=8))
    by_id = {answer.request.id: answer for answer in found}
    same = [by_id[row["id"]].answer_ids == row["answer_ids"] for row in rows]
    # A near tie may fall the other way where matrices are multiplied in another order.
    assert sum(same) >= len(rows) - 1
