"""The decode command from files to text, and what it refuses."""

import json
import re

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from outrider.data.sampling import row_key
from outrider.data.target import Target
from outrider.eval.decode import Decoding, decode
from outrider.heads import save_head
from outrider.scripts import decode_command
from outrider.scripts.cli import main as outrider

TEMPLATE = "{% for m in messages %}w1 {{ m.content }} w3 {% endfor %}"


@pytest.fixture(scope="module")
def files(tiny_target, tiny_head, tmp_path_factory):
    root = tmp_path_factory.mktemp("files")
    tiny_target.model.save_pretrained(root / "target")
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(61)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w3")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(root / "target")
    save_head(tiny_head, root / "head")
    said = [{"role": "user", "content": "w8 w9"}]
    rows = [
        {"id": "a", "prompt_ids": [5, 6, 7]},
        {"id": "a again", "prompt_ids": [5, 6, 7]},
        {"id": "b", "messages": [*said, {"role": "assistant", "content": "w4"}]},
        {"id": "c", "prompt_ids": [20, 21]},
    ]
    (root / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return root


def run(files, capsys, *more):
    outrider(
        [
            "decode",
            "--target",
            str(files / "target"),
            "--max-new-tokens",
            "12",
            "--ignore-eos",
            *more,
        ]
    )
    return capsys.readouterr().out


def test_a_prompt_is_answered_as_plainly_and_the_gain_is_told(files, capsys):
    head = ["--head", str(files / "head"), "--draft", "tree:3,3,8"]
    out = run(files, capsys, "--prompt", "w5 w6", "--prompt", "w9", *head)
    target = Target.load(str(files / "target"))
    ids = decode(target, [1, 5, 6, 3], None, Decoding(max_new_tokens=12, ignore_eos=True)).ids
    assert target.tokenizer.decode(ids, skip_special_tokens=True) in out
    assert "--- prompt 1 (4 tokens)" in out
    assert "12 tokens, " in out
    assert "same text in 1 of 1" in out
    assert "=== 2 prompts: 24 tokens" in out
    assert "same text in 2 of 2" in out


def test_rows_are_read_once_each_and_keyed_by_name(files, capsys):
    sampled = ["--temperature", "1", "--seed", "3"]
    out = run(files, capsys, "--data", str(files / "rows.jsonl"), "--limit", "2", *sampled)
    assert "--- a (3 tokens)" in out
    assert "--- b (4 tokens)" in out
    assert "again" not in out
    assert "--- c" not in out
    target = Target.load(str(files / "target"))
    settings = decode_command.Settings(target="", data="x").decoding
    decoding = type(settings)(
        max_new_tokens=12,
        ignore_eos=True,
        seed=3,
        sampling=type(settings.sampling)(temperature=1.0),
    )
    ids = decode(target, [5, 6, 7], None, decoding, row=row_key("a")).ids
    assert target.tokenizer.decode(ids, skip_special_tokens=True) in out


@pytest.mark.parametrize(
    ("draft", "rule", "keeps_text"),
    [
        ("chain:3", [], False),
        ("chain:3", ["--rule", "match"], True),
        ("tree:2,2,4", [], True),
        ("tree:2,2,4", ["--rule", "point_mass"], False),
    ],
)
def test_sampled_text_is_compared_where_the_rule_keeps_it(files, capsys, draft, rule, keeps_text):
    head = ["--head", str(files / "head"), "--draft", draft, "--temperature", "1"]
    out = run(files, capsys, "--prompt", "w5 w6", *head, *rule)
    assert ("same text in 1 of 1" in out) == keeps_text
    assert "plain" in out


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_a_policy_says_how_long_chains_are(files, capsys, temperature):
    more = ["--prompt", "w4 w5", "--head", str(files / "head"), "--temperature", temperature]
    said = run(files, capsys, *more, "--policy", "heuristic:2,4", "--names")
    assert "12 tokens" in said
    assert re.search(r"^gpt-fast +Acceptance probs( +[\d.]+){3,5} ", said, re.MULTILINE)
    if temperature == "0":
        assert "same text in 1 of 1" in said


def test_a_run_is_told_in_the_terms_of_other_tools(files, capsys):
    head = ["--head", str(files / "head"), "--draft", "chain:3"]
    said = run(files, capsys, "--prompt", "w4 w5", *head, "--names")
    calls, tau = re.search(r"(\d+) target calls, ([\d.]+) a call", said).groups()
    assert int(calls) > 1
    (ours,) = re.findall(r"^Outrider +tau +([\d.]+)", said, re.MULTILINE)
    assert float(ours) == pytest.approx(float(tau), abs=0.005)
    assert re.search(r"^vLLM +Mean acceptance length +[\d.]+ +1 \+ A / R_d", said, re.MULTILINE)


def test_plain_decoding_can_be_skipped(files, capsys):
    out = run(files, capsys, "--prompt", "w5", "--head", str(files / "head"), "--skip-plain")
    assert "plain" not in out
    assert "a call" in out


def test_a_text_that_must_not_differ_fails_the_command(files, capsys, monkeypatch):
    def spoilt(target, ids, drafter=None, *rest, **more):
        found = decode(target, ids, drafter, *rest, **more)
        if drafter is not None:
            found.ids[-1] += 1
        return found

    monkeypatch.setattr(decode_command, "decode", spoilt)
    with pytest.raises(SystemExit, match="a text differs from plain decoding; in float32"):
        run(files, capsys, "--prompt", "w5", "--head", str(files / "head"))
    with pytest.raises(SystemExit, match="differs from plain decoding by more than rounding"):
        run(files, capsys, "--prompt", "w5", "--head", str(files / "head"), "--dtype", "bfloat16")
    out = capsys.readouterr().out
    assert re.search(r"first difference at token 11: \d+ for \d+, gap .* noise .*: defect", out)


def test_accepted_drafts_are_green_on_a_terminal(files, capsys):
    target = Target.load(str(files / "target"))
    show = decode_command.printer(target, is_terminal=True)
    show([5, 6], [False, True])
    assert capsys.readouterr().out == "w5\033[32m w6\033[0m"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "give either --prompt or --data, and not both"),
        (["--prompt", "w5", "--data", "rows.jsonl"], "give either --prompt or --data"),
        (["--prompt", "w5", "--limit", "0"], "limit is 0; give 1 or more"),
        (["--prompt", "w5", "--draft", "tree:2,2,4", "--names"], "for one chain a round"),
        (["--prompt", "w5", "--policy", "fixed"], "write fixed:K"),
        (["--prompt", "w5", "--policy", "oracle:2"], "it knows the future"),
        (["--prompt", "w5", "--draft", "bush:2"], "write chain:LENGTH, such as chain:3"),
        (
            ["--prompt", "w5", "--temperature", "1", "--rule", "greedy"],
            "use greedy at 0, and above",
        ),
        (
            ["--prompt", "w5", "--temperature", "1", "--draft", "tree:3,3,8", "--rule", "block"],
            "these are chosen (tree:, static: and lookup: take likely tokens); draft that way",
        ),
        (["--prompt", "w5", "--rule", "typical"], "no verification rule called 'typical'"),
    ],
)
def test_bad_requests_are_refused(files, capsys, more, message):
    with pytest.raises(SystemExit, match="2"):
        run(files, capsys, "--head", str(files / "head"), *more)
    shown = " ".join(capsys.readouterr().err.replace("\u2502", " ").split())
    assert message in shown


def test_rows_without_a_prompt_are_refused(files, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": "a", "messages": [{"role": "assistant", "content": "w5"}]}\n')
    with pytest.raises(SystemExit, match="2"):
        run(files, capsys, "--data", str(path))
    assert "row 1 has neither prompt_ids nor messages with a user's turn" in capsys.readouterr().err


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_a_draft_model_drafts_chains(files, capsys, temperature):
    model = ["--model", "layers:5", "--draft", "chain:3", "--temperature", temperature]
    out = run(files, capsys, "--prompt", "w5 w6", *model)
    assert float(re.search(r"([\d.]+) a call", out)[1]) > 1
    for more, message in (
        (["--model", "layers:5", "--head", str(files / "head")], "give one of them"),
        (["--model", "layers:5", "--draft", "tree:2,2,4"], "a draft model drafts chains"),
    ):
        with pytest.raises(SystemExit) as stopped:
            run(files, capsys, "--prompt", "w5 w6", *more)
        assert stopped.value.code == 2
        assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


@pytest.mark.parametrize("temperature", ["0", "1"])
@pytest.mark.parametrize(
    "draft",
    [
        "hybrid:lookup:4+chain:3",
        "window:3,8",
        "universal:3",
        "lookahead:3,3,3",
        "suffix:4,4,100",
        "oracle:3",
        "synthetic:3,0.5",
    ],
)
def test_every_draft_of_the_loop_is_compared_with_plain_decoding(files, capsys, draft, temperature):
    more = {"hybrid": ["--head", "head"], "universal": ["--model", "target"]}
    more = more.get(draft.partition(":")[0], [])
    more = [str(files / one) if one in ("head", "target") else one for one in more]
    rule = ["--rule", "match"] if temperature == "1" else []
    asked = ["--prompt", "w5 w6", "--prompt", "w9", "--temperature", temperature, *rule, *more]
    out = run(files, capsys, *asked, "--draft", draft)
    assert "same text in 2 of 2" in out
    assert "=== 2 prompts: 24 tokens" in out
    if draft == "oracle:3":
        # Three drafts and one more a call: of 12 tokens the first is the prefill's.
        assert "24 tokens, 6 target calls, 3.67 a call" in out
        assert "same text in 2 of 2" in run(files, capsys, *asked, "--draft", draft, "--skip-plain")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--draft", "hybrid:lookup:4+chain:3"], "needs a head and head is None; give --head"),
        (["--draft", "universal:3"], "it needs a draft model: give --model"),
        (["--draft", "oracle:3", "--temperature", "1", "--rule", "one_coin"], "above .* by match"),
    ],
)
def test_drafts_of_the_loop_without_what_they_need(files, capsys, more, message):
    with pytest.raises((SystemExit, ValueError)) as caught:
        run(files, capsys, "--prompt", "w5", *more)
    said = str(caught.value) + capsys.readouterr().err
    assert re.search(message, said)
