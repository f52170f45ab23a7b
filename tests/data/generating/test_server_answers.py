"""`outrider generate --server`: the in-process answers, whatever fails on the way."""

import json
import re
import threading
import time

import pytest

from outrider.data import retry
from outrider.data.manifest import manifest_path
from outrider.scripts.generate_command import main

NUM_ROWS = 30


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("OUTRIDER_API_KEY", raising=False)


@pytest.fixture
def generate(root, server, tmp_path):
    """Runs the command, served or not; gives the file."""

    def run(*more, name="rows", served=True):
        out = tmp_path / f"{name}.jsonl"
        words = ["--target", str(root / "target"), "--prompts", str(root / "prompts.jsonl")]
        words += ["--out", str(out), "--max-new-tokens", "24", *more]
        main([*words, "--server", server.url] if served else words)
        return out

    return run


@pytest.fixture(scope="module")
def expected(root, tmp_path_factory):
    """The rows that the target answers in process."""
    out = tmp_path_factory.mktemp("local") / "rows.jsonl"
    words = ["--target", str(root / "target"), "--prompts", str(root / "prompts.jsonl")]
    main([*words, "--out", str(out), "--max-new-tokens", "24"])
    return out.read_bytes()


def manifest(out):
    return json.loads(manifest_path(out).read_text())


def rows(out):
    return [json.loads(line) for line in out.read_bytes().splitlines()]


def test_a_server_that_is_killed_and_started_again_costs_no_row(generate, server, place, expected):
    """In the middle of the run, which waits for it."""
    generated = []
    server.change = lambda reply, body: (time.sleep(0.1), reply)[1]
    client = threading.Thread(target=lambda: generated.append(generate("--concurrency", "4")))
    client.start()
    while sum(server.answered.values()) < 9:
        time.sleep(0.01)
    place.kill()
    before = sum(server.answered.values())
    assert before < NUM_ROWS
    time.sleep(1)
    place.start()
    client.join()
    assert generated[0].read_bytes() == expected
    assert place.server.num_asked >= NUM_ROWS - before > 0


def test_greedy_rows_are_those_of_the_target_in_process(generate, server, expected, capsys):
    out = generate()
    assert out.read_bytes() == expected
    found = manifest(out)
    settings = found["settings"]
    assert (settings["by"], settings["server_form"]) == ("server", "ids")
    assert settings["server_model"] == server.name
    assert settings["target_hash_covers_weights"] is True
    (run,) = found["runs"]
    assert run["server"] == f"{server.url}/"
    assert run["server_version"] == "small-1"
    assert found["counts"]["rows"] == NUM_ROWS
    assert set(server.answered.values()) == {1}  # each row once, and the first question
    assert "30 rows, " in capsys.readouterr().out
    asked = server.num_asked
    generate()
    assert "finished before with the same settings: nothing to do" in capsys.readouterr().out
    assert server.num_asked == asked


def test_every_fault_is_outlasted(generate, server, expected, capfd):
    server.faults = {1: "busy", 2: 500, 3: "drop", 4: "cut", 5: 503, 6: "slow", 9: 502, 12: "drop"}
    out = generate("--request-timeout", "3", "--concurrency", "4")
    assert out.read_bytes() == expected
    assert server.num_asked == 1 + NUM_ROWS + 8
    assert server.most_at_once <= 5  # the slow one goes on when its client has left
    assert "trying again for up to 600 s" in capfd.readouterr().err


def test_retry_after_is_obeyed(generate, server, expected):
    server.faults = {1: "busy"}
    out = generate("--concurrency", "1")
    assert out.read_bytes() == expected
    assert server.times[2] - server.times[1] >= 1


def test_requests_are_under_way_at_once_up_to_the_bound(generate, server, monkeypatch):
    reply = server.change
    server.change = lambda found, body: (time.sleep(0.05), reply(found, body))[1]
    generate("--concurrency", "5")
    assert 2 <= server.most_at_once <= 5


@pytest.mark.parametrize("form", ["text", "chat"])
def test_servers_without_ids_give_text_that_the_rows_say_was_retokenised(
    generate, server, form, capsys
):
    short = ("--max-new-tokens", "2")  # a tiny random model soon writes what no tokenizer would
    local = rows(generate(*short, name="local", served=False))
    if form == "text":
        server.returns_ids = False
    else:
        server.forms = ("chat/completions",)
    out = generate(*short)
    found = manifest(out)
    assert found["settings"]["server_form"] == form
    num_other = 0
    for row, wanted in zip(rows(out), local, strict=True):
        assert row["prompt_ids"] == wanted["prompt_ids"]
        is_same = len(row["answer_ids"]) == len(wanted["answer_ids"])
        assert row["retokenised"] == ("same count" if is_same else "other")
        assert row["finish"] == wanted["finish"]
        assert row["messages"] == wanted["messages"]
        assert "text_gives_other_ids" in wanted or row["answer_ids"] == wanted["answer_ids"]
        num_other += not is_same
    assert 0 < num_other < NUM_ROWS
    assert found["counts"]["retokenised"] == NUM_ROWS
    assert found["counts"]["retokenised_to_other_ids"] == num_other
    assert (
        f"{num_other} rows came back as text that gives another number" in capsys.readouterr().out
    )


def test_a_row_is_sent_its_sampling_in_full_and_a_seed_of_its_own(generate, server):
    out = generate("--temperatures", "0,0.7,1", "--top-k", "5", "--logit-bias", "7", "-2")
    sent = server.bodies[1:]
    assert len({body["seed"] for body in sent}) == NUM_ROWS
    stated = sorted(row["temperature"] for row in rows(out))
    assert sorted(body["temperature"] for body in sent) == stated
    assert set(stated) == {0.0, 0.7, 1.0}
    for body in sent:
        assert (body["top_k"], body["top_p"], body["min_p"]) == (5, 1.0, 0.0)
        assert body["repetition_penalty"] == 1.0
        assert body["logit_bias"] == {"7": -2.0}
        assert body["stop_token_ids"] == [2]
    again = generate("--temperatures", "0,0.7,1", "--top-k", "5", "--logit-bias", "7", "-2",
                     "--concurrency", "3", name="again")  # fmt: skip
    assert again.read_bytes() == out.read_bytes()
    other = generate("--temperatures", "0,0.7,1", "--seed", "1", name="other")
    assert [row["temperature"] for row in rows(other)] != [r["temperature"] for r in rows(out)]


def test_fields_that_do_nothing_are_left_out_where_a_server_refuses_them(
    generate, server, expected
):
    server.refused = ("top_k", "min_p", "stop_token_ids")
    out = generate()
    assert out.read_bytes() == expected
    assert manifest(out)["runs"][0]["fields_not_sent"] == ["min_p", "stop_token_ids", "top_k"]
    with pytest.raises(ValueError, match=r"request 'r\d+': status 400: unrecognized field: top_k"):
        generate("--top-k", "5", "--temperature", "1", name="other")


def test_the_key_comes_from_the_environment(generate, server, expected, monkeypatch):
    server.key = "sesame"
    with pytest.raises(ValueError, match=r"status 401: wrong key; set OUTRIDER_API_KEY"):
        generate()
    monkeypatch.setenv("OUTRIDER_API_KEY", "sesame")
    out = generate()
    assert out.read_bytes() == expected
    assert "sesame" not in manifest_path(out).read_text()


def test_another_model_is_refused_unless_it_is_named(generate, server, expected):
    server.served = ["org/other", "alias"]
    with pytest.raises(ValueError, match=r"serves 'org/other', 'alias', none of which is called"):
        generate()
    with pytest.raises(ValueError, match=r"serves 'org/other', 'alias', and no 'aliaz'"):
        generate("--server-model", "aliaz")
    out = generate("--server-model", "alias")
    assert out.read_bytes() == expected
    assert manifest(out)["settings"]["server_model"] == "alias"
    server.change = lambda reply, body: {**reply, "model": "org/other"}
    with pytest.raises(ValueError, match="the reply is by model 'org/other', not 'alias'"):
        generate("--server-model", "alias", name="second")


def with_choice(**changes):
    def change(reply, body):
        if body["max_tokens"] != 24:  # the first question is answered as it should be
            return reply
        return {**reply, "choices": [{**reply["choices"][0], **changes}]}

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_choice(prompt_token_ids=[1, 2]), "to other prompt_token_ids than were sent"),
        (with_choice(token_ids=[5, 2, 6]), r"goes on after its end token \(number 2 of 3\)"),
        (with_choice(token_ids=[]), "the answer is empty"),
        (with_choice(token_ids=[9] * 25, finish_reason="length"), "has 25 tokens, of 24"),
        (with_choice(token_ids=[9] * 3, finish_reason="length"), "has 3 token ids and counts"),
        (with_choice(finish_reason="content_filter"), "ended by 'content_filter'"),
        (with_choice(token_ids=None), "the reply has no token_ids"),
        (lambda reply, body: {**reply, "choices": []} if body["max_tokens"] == 24 else reply,
         "the reply has no choice"),
    ],
)  # fmt: skip
def test_answers_that_cannot_be_are_refused_by_row(generate, server, change, message):
    server.change = change
    with pytest.raises(ValueError, match=rf"request 'r\d+': .*{message}.*nothing that was"):
        generate()


def test_a_server_with_another_template_is_refused(generate, server):
    server.forms = ("chat/completions",)

    def longer(reply, body):
        return {**reply, "usage": {**reply["usage"], "prompt_tokens": 99}}

    server.change = longer
    with pytest.raises(ValueError, match=r"made 99 tokens of a prompt that is \d+ by the target's"):
        generate()


def test_what_is_no_such_server_is_told(generate, server):
    server.forms = ()
    with pytest.raises(ValueError, match=r"cannot be asked in any form \(ids: status 404: Not Fou"):
        generate()
    server.reset()
    server.faults = {0: "not JSON"}
    with pytest.raises(ValueError, match=r"the reply is not JSON \('<html>'\)"):
        generate("--server-form", "ids")
    with pytest.raises(ValueError, match="give the address that ends in /v1"):
        generate("--server", server.url.removesuffix("/v1"), served=False)


def test_a_server_that_stays_away_is_given_up_with_what_was_answered(
    generate, server, expected, tmp_path
):
    server.faults = dict.fromkeys(range(9, 10_000), 503)
    with pytest.raises(ValueError, match=r"not answered for 1 s \(last: status 503: down\); start"):
        generate("--patience", "1", "--concurrency", "2")
    partial = tmp_path / "rows.jsonl.partial.jsonl"
    kept = [json.loads(line)["id"] for line in partial.read_bytes().splitlines()[2:]]
    assert len(kept) == 8
    server.faults = {}
    asked = server.num_asked
    assert generate().read_bytes() == expected
    assert server.num_asked == asked + 1 + NUM_ROWS - 8


def test_a_begun_file_is_not_continued_in_another_form_or_process(generate, server):
    server.faults = dict.fromkeys(range(9, 10_000), 503)
    with pytest.raises(ValueError, match="has not answered for 1 s"):
        generate("--patience", "1")
    server.faults, server.returns_ids = {}, False
    with pytest.raises(ValueError, match=r"server_form: 'ids', not 'text'"):
        generate()
    with pytest.raises(ValueError, match=r"by: 'server', not 'process'"):
        generate(served=False)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--bad-words", "5"], "bad_words are token ids, which no server takes"),
        (["--filters", "joint", "--temperature", "1"], "filters is joint, but a server filters"),
        (["--logit-bias", "5", "200"], "logit_bias is beyond 100, which servers clip"),
    ],
)
def test_sampling_that_no_server_does_is_refused(generate, more, message):
    with pytest.raises(ValueError, match=message):
        generate(*more)


def test_waits_grow_with_jitter_and_end_with_the_patience(monkeypatch):
    import asyncio

    from httpx2 import AsyncClient, MockTransport, Response

    waits, clock = [], [0.0]

    async def sleep(seconds):
        waits.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(retry.asyncio, "sleep", sleep)
    monkeypatch.setattr(retry.time, "monotonic", lambda: clock[0])

    async def ask():
        transport = MockTransport(lambda _: Response(503, headers={"retry-after": ""}))
        async with AsyncClient(transport=transport, base_url="http://h") as client:
            patience = retry.Patience(total_s=300, first_s=1, longest_s=16)
            await retry.Sender(client, patience).send("GET", "x")

    with pytest.raises(ValueError, match="has not answered for 300 s"):
        asyncio.run(ask())
    bounds = [min(2.0**place, 16.0) for place in range(len(waits))]
    assert all(0 <= wait <= bound for wait, bound in zip(waits, bounds, strict=True))
    assert 250 < sum(waits) <= 300
    shares = [wait / bound for wait, bound in zip(waits, bounds, strict=True)]
    assert min(shares) < 0.4
    assert max(shares) > 0.6


def test_retry_after_is_read_as_seconds_or_date():
    from httpx2 import Response

    def seconds(text):
        return retry.retry_after_s(Response(429, headers={"retry-after": text}))

    assert seconds("7") == 7
    assert seconds("-3") == 0
    assert seconds("soon") == 0
    now = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 90))
    assert 85 < seconds(now) <= 90
    assert retry.retry_after_s(Response(429)) == 0


def test_errors_are_read_from_where_servers_put_them():
    from httpx2 import Response

    for content in (
        {"error": {"message": "so  it\nis", "code": 400}},
        {"error": "so it is"},
        {"message": "so it is"},
        {"detail": "so it is"},
    ):
        assert retry.message_of(Response(400, json=content)) == "so it is"
    assert len(retry.message_of(Response(500, text="x" * 900))) == 500
    assert re.search(
        "loc.*body", retry.message_of(Response(422, json={"detail": [{"loc": "body"}]}))
    )
