"""`outrider.eval.generate` beside transformers' own: the same call, the same answer."""

import copy
import threading
import warnings

import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput

from outrider.data.target import Target
from outrider.eval import generate
from outrider.eval.drafters.model import first_layers
from outrider.eval.generation.outcome import SpeculativeOutput
from outrider.eval.link import tables
from outrider.eval.trees.plans import plan_named
from outrider.heads import save_head

PROMPTS = [[5, 9, 14, 22], [41, 7, 7, 30, 12, 55, 8], [60], [33, 2, 11, 19, 19, 4]]
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 30, "top_p": 0.95, "max_new_tokens": 16}


@pytest.fixture(scope="module")
def model(tiny_target):
    return tiny_target.model


def batch(prompts, side="left", pad=0):
    longest = max(map(len, prompts))
    ids, mask = [], []
    for prompt in prompts:
        pads, hidden = [pad] * (longest - len(prompt)), [0] * (longest - len(prompt))
        shown = [1] * len(prompt)
        ids.append(pads + prompt if side == "left" else prompt + pads)
        mask.append(hidden + shown if side == "left" else shown + hidden)
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


# transformers' criterion for stop strings spells "abcdef" to learn how pieces are joined.
PIECES = [*(f"[{token}]" for token in range(55)), *"abcdef"]


@pytest.fixture(scope="module")
def tokenizer():
    """Every token of the tiny target is [its number], the last are letters."""
    vocab = {piece: place for place, piece in enumerate(PIECES)}
    made = Tokenizer(BPE(vocab=vocab, merges=[], unk_token="[0]"))
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.fixture(scope="module")
def drafts(tiny_target, tiny_head, tmp_path_factory):
    """What may draft, by name: head and draft arguments."""
    folder = tmp_path_factory.mktemp("head")
    save_head(tiny_head, folder / "head")
    smaller = first_layers(tiny_target, 4)
    return {
        "none": {},
        "folder": {"head": folder / "head"},
        "folder, tree": {"head": str(folder / "head"), "draft": "tree:3,3,8"},
        "head": {"head": tiny_head, "draft": "chain:4"},
        "drawn": {"head": tiny_head, "draft": "drawn:3,2,6"},
        "model": {"head": smaller.model},
        "target": {"head": smaller, "draft": "chain:2"},
        "lookup": {"draft": "lookup:4,2"},
        "suffix": {"draft": "suffix:4"},
    }


NAMES = [
    "none", "folder", "folder, tree", "head", "drawn", "model", "target", "lookup", "suffix",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [1, 4])
def test_greedy_text_is_that_of_transformers(model, drafts, name, rows):
    inputs = batch(PROMPTS[:rows])
    wanted = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    found = generate(model, inputs, **drafts[name], max_new_tokens=24)
    assert torch.equal(found, wanted)
    assert torch.equal(generate(model, **inputs, **drafts[name], max_new_tokens=24), wanted)


def test_right_padding_gives_the_same_answers(model, drafts):
    left, right = batch(PROMPTS), batch(PROMPTS, "right")
    width = left["input_ids"].shape[1]
    wanted = model.generate(**left, max_new_tokens=20, do_sample=False)[:, width:]
    found = generate(model, right, **drafts["head"], max_new_tokens=20)
    assert torch.equal(found[:, :width], right["input_ids"])
    assert torch.equal(found[:, width:], wanted)


@pytest.mark.parametrize("settings", [
    {"max_new_tokens": 1},
    {"max_length": 19},
    {},
    {"max_new_tokens": 24, "eos_token_id": [46, 60, 34]},
    {"max_new_tokens": 24, "eos_token_id": 17, "pad_token_id": 9},
    {"max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0},
    {"max_new_tokens": 12, "num_beams": 1, "num_return_sequences": 1, "use_cache": True},
    {"max_new_tokens": 12, "prefill_chunk_size": 3},
])  # fmt: skip
@pytest.mark.parametrize("name", ["none", "folder, tree", "head", "model"])
def test_lengths_and_ends_are_those_of_transformers(model, drafts, name, settings):
    inputs = batch(PROMPTS)
    chunk_free = {key: value for key, value in settings.items() if key != "prefill_chunk_size"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it advises to say how many tokens are wanted
        wanted = model.generate(**inputs, do_sample=False, **chunk_free)
    assert torch.equal(generate(model, inputs, **drafts[name], **settings), wanted)


@pytest.mark.parametrize("name", ["none", "folder, tree", "head", "lookup"])
def test_a_repetition_penalty_is_that_of_each_row_alone(model, drafts, name):
    """transformers penalises the padding of a batch, too; here a row is as if alone."""
    settings = {"max_new_tokens": 20, "repetition_penalty": 1.4}
    found = generate(model, batch(PROMPTS), **drafts[name], **settings)[:, 7:]
    for prompt, row in zip(PROMPTS, found.tolist(), strict=True):
        alone = torch.tensor([prompt])
        wanted = model.generate(alone, do_sample=False, **settings)[0, len(prompt) :].tolist()
        assert row[: len(wanted)] == wanted
        assert set(row[len(wanted) :]) <= {3}


def test_a_generation_config_goes_before_the_models_own_and_keywords_before_it(model):
    inputs = batch(PROMPTS)
    config = GenerationConfig(max_new_tokens=5, repetition_penalty=1.4, eos_token_id=3)
    found = generate(model, inputs, generation_config=config)
    assert found.shape == (4, 12)
    assert generate(model, inputs, generation_config=config, max_new_tokens=7).shape == (4, 14)
    plain = generate(model, inputs, generation_config=config, repetition_penalty=None)
    assert torch.equal(plain, generate(model, inputs, max_new_tokens=5))
    assert not torch.equal(plain, found)
    before = model.generation_config
    try:
        model.generation_config = GenerationConfig(max_new_tokens=3, pad_token_id=0)
        assert generate(model, inputs).shape == (4, 10)
    finally:
        model.generation_config = before


def test_pads_are_found_as_transformers_finds_them(model):
    inputs = batch(PROMPTS)
    wanted = model.generate(inputs["input_ids"], max_new_tokens=8, pad_token_id=0, do_sample=False)
    found = generate(model, inputs["input_ids"], max_new_tokens=8, pad_token_id=0)
    assert torch.equal(found, wanted)
    # Where the pad may be an end token, nothing is hidden.
    ends = batch(PROMPTS, pad=3)["input_ids"]
    wanted = model.generate(
        ends, attention_mask=torch.ones_like(ends), max_new_tokens=8, do_sample=False
    )
    assert torch.equal(generate(model, ends, max_new_tokens=8, pad_token_id=3), wanted)


@pytest.mark.parametrize("name", NAMES)
def test_sampled_rows_hang_on_no_neighbour(model, drafts, name):
    prompts = PROMPTS
    settings = {**drafts[name], **SAMPLED, "seed": 7}
    together = generate(model, batch(prompts), **settings)[:, 7:].tolist()
    backward = generate(model, batch(prompts[::-1]), **settings)[:, 7:].tolist()[::-1]
    assert backward == together
    for prompt, row in zip(prompts, together, strict=True):
        alone = generate(model, batch([prompt]), **settings)[0, len(prompt) :].tolist()
        assert row[: len(alone)] == alone


def test_equal_prompts_are_sampled_apart_and_seeds_tell_texts_apart(model):
    found = generate(model, batch([PROMPTS[0]] * 3), **SAMPLED, seed=1)
    assert len({tuple(row) for row in found.tolist()}) == 3
    again = generate(model, batch([PROMPTS[0]] * 3), **SAMPLED, seed=1)
    assert torch.equal(found, again)
    assert not torch.equal(generate(model, batch([PROMPTS[0]] * 3), **SAMPLED, seed=2), found)


def test_torch_seeds_what_has_no_seed_and_greedy_text_draws_none(model):
    inputs = batch(PROMPTS)
    torch.manual_seed(5)
    one, two = generate(model, inputs, **SAMPLED), generate(model, inputs, **SAMPLED)
    torch.manual_seed(5)
    assert torch.equal(generate(model, inputs, **SAMPLED), one)
    assert not torch.equal(one, two)
    state = torch.get_rng_state()
    generate(model, inputs, max_new_tokens=2)
    assert torch.equal(torch.get_rng_state(), state)


def test_defaults_of_sampling_are_those_of_transformers(model):
    """Top-k is 50 unless it is taken away; so a flat law loses 11 of 61 tokens."""
    prompts = batch([[5]] * 400)
    settings = {"do_sample": True, "temperature": 50.0, "max_new_tokens": 1, "seed": 0}
    some = set(generate(model, prompts, **settings)[:, 1].tolist())
    every = set(generate(model, prompts, **settings, top_k=None)[:, 1].tolist())
    assert len(some) <= 50 < len(every)


@pytest.mark.parametrize("name", ["none", "head", "folder, tree"])
def test_stop_strings_cut_where_transformers_cuts(model, drafts, tokenizer, name):
    inputs = batch(PROMPTS)
    texts = model.generate(**inputs, max_new_tokens=20, do_sample=False)[:, 7:].tolist()
    spelt = [[PIECES[token] for token in text] for text in texts]
    # The end of one token, a whole one and the beginning of another; and the end of a single one.
    first = spelt[3][1][-1] + spelt[3][2] + spelt[3][3][0]
    for strings in ([first], [first, spelt[1][2][1:]], spelt[0][3]):
        settings = {"max_new_tokens": 20, "stop_strings": strings, "tokenizer": tokenizer}
        wanted = model.generate(**inputs, do_sample=False, **settings)
        assert generate(model, inputs, **drafts[name], **settings).tolist() == wanted.tolist()
        alone = batch(PROMPTS[:1])
        wanted = model.generate(**alone, do_sample=False, **settings)
        assert torch.equal(generate(model, alone, **drafts[name], **settings), wanted)


class Heard(BaseStreamer):
    def __init__(self):
        self.puts, self.ended = [], 0

    def put(self, value):
        self.puts.append(value)

    def end(self):
        self.ended += 1


def test_streamers_hear_the_prompt_and_every_block(model, drafts, tokenizer, capsys):
    inputs = batch(PROMPTS[:1])
    heard = Heard()
    found = generate(model, inputs, **drafts["head"], max_new_tokens=20, streamer=heard)
    assert torch.equal(heard.puts[0], inputs["input_ids"])
    assert torch.equal(torch.cat(heard.puts, 1), found)
    assert max(one.shape[1] for one in heard.puts[1:]) > 1
    assert heard.ended == 1

    printed = {}
    for which in ("ours", "theirs"):
        settings = {"max_new_tokens": 20, "streamer": TextStreamer(tokenizer, skip_prompt=True)}
        if which == "ours":
            generate(model, inputs, **drafts["head"], **settings)
        else:
            model.generate(**inputs, do_sample=False, **settings)
        printed[which] = capsys.readouterr().out
    assert printed["ours"] == printed["theirs"]
    assert printed["ours"] == "".join(PIECES[token] for token in found[0, 4:]) + "\n"

    pieces = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    settings = {**drafts["head"], "max_new_tokens": 20, "streamer": pieces}
    worker = threading.Thread(target=generate, args=(model, inputs), kwargs=settings)
    worker.start()
    assert "".join(pieces) == printed["ours"].rstrip("\n")
    worker.join()


def test_batches_are_heard_row_by_row(model, drafts):
    heard = {row: [] for row in range(4)}
    found = generate(
        model,
        batch(PROMPTS),
        **drafts["head"],
        max_new_tokens=20,
        eos_token_id=None,
        on_tokens=lambda row, ids: heard[row].extend(ids),
    )
    assert [heard[row] for row in range(4)] == found[:, 7:].tolist()


@pytest.mark.parametrize("rows", [1, 4])
def test_statistics_add_up(model, drafts, rows):
    settings = {**drafts["head"], "max_new_tokens": 20, "eos_token_id": None}
    found = generate(model, batch(PROMPTS[:rows]), **settings, return_dict_in_generate=True)
    assert isinstance(found, GenerateDecoderOnlyOutput)
    assert isinstance(found, SpeculativeOutput)
    heard = []
    plain = generate(model, batch(PROMPTS[:rows]), **settings, on_statistics=heard.append)
    assert torch.equal(plain, found.sequences)
    for one in (found.statistics, *heard):
        assert [row.new_tokens for row in one.rows] == [20] * rows
        assert one.new_tokens == 20 * rows
        assert one.target_calls == max(len(row.rounds) for row in one.rows)
        rounds = sum(len(row.rounds) for row in one.rows)
        assert one.tokens_per_call == pytest.approx(19 * rows / rounds)
        assert one.tokens_per_call > 1.2
        assert {row.finish for row in one.rows} == {"length"}
        assert one.rows[0].tokens_per_call == 19 / len(one.rows[0].rounds)
        assert min(one.prefill_seconds, one.draft_seconds, one.verify_seconds) > 0
        assert f"{20 * rows} tokens in {rows} rows" in str(one)


def test_a_model_is_left_as_it_was_found(tiny_target):
    model = copy.deepcopy(tiny_target.model).requires_grad_(requires_grad=True).train()
    model.model.layers[2].eval()
    model.lm_head.weight.requires_grad_(requires_grad=False)
    modes = [module.training for module in model.modules()]
    grads = [weight.requires_grad for weight in model.parameters()]
    inputs = batch(PROMPTS)
    first = generate(model, inputs, max_new_tokens=8)
    assert [module.training for module in model.modules()] == modes
    assert [weight.requires_grad for weight in model.parameters()] == grads
    with pytest.raises(ValueError, match="num_beams is 2"):
        generate(model, inputs, num_beams=2)
    assert [weight.requires_grad for weight in model.parameters()] == grads
    # Steps of an optimizer in between are seen, and so is another precision.
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    second = generate(model, inputs, max_new_tokens=8)
    assert not torch.equal(first, second)
    assert torch.equal(second, model.eval().generate(**inputs, max_new_tokens=8, do_sample=False))
    model.double()
    wanted = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert torch.equal(generate(model, inputs, max_new_tokens=8), wanted)


def test_three_calls_give_identical_numbers(model, drafts):
    for name in ("folder, tree", "model", "lookup"):
        found = [
            generate(
                model, batch(PROMPTS), **drafts[name], max_new_tokens=20,
                return_dict_in_generate=True,
            )
            for _ in range(3)
        ]  # fmt: skip
        rounds = [[row.rounds for row in one.statistics.rows] for one in found]
        assert rounds[0] == rounds[1] == rounds[2]
        assert torch.equal(found[0].sequences, found[2].sequences)


def test_a_prompt_near_the_last_position_is_said_and_ends_there(model):
    limit = model.config.max_position_embeddings
    inputs = torch.full((1, limit - 3), 7)
    with pytest.warns(UserWarning, match=f"go beyond the {limit} positions"):
        found = generate(model, inputs, max_new_tokens=8, eos_token_id=None)
    assert found.shape[1] == limit


REFUSED = [
    ({"num_beams": 4}, r"num_beams is 4, which outrider's generate has not: beams cannot"),
    ({"num_return_sequences": 2}, "repeat the prompt in the batch"),
    ({"assistant_model": "x"}, "give the draft model as head="),
    ({"prompt_lookup_num_tokens": 10}, "write draft='lookup:10'"),
    ({"logits_processor": [1]}, "logits_processor is .*own generate for others"),
    ({"stopping_criteria": [1]}, "use stop_strings or eos_token_id"),
    ({"output_scores": True}, "verification does not keep them"),
    ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size is 3.*leave it out"),
    ({"min_new_tokens": 4}, "min_new_tokens is 4"),
    ({"typical_p": 0.9, "do_sample": True}, "typical_p is 0.9"),
    ({"cache_implementation": "static"}, "cache_implementation is 'static'"),
    ({"max_tokens": 4}, "max_tokens is 4.*no setting of this name is known"),
    ({"max_new_tokens": 0}, "max_new_tokens is 0; write at least 1"),
    ({"max_length": 7}, "max_length is 7 and the prompts have 7 tokens"),
    ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'; give a token id"),
    ({"top_p": 1.5, "do_sample": True}, r"top_p is 1\.5"),
    ({"draft": "chain"}, "draft is 'chain'; write chain:LENGTH"),
    ({"draft": "chain:3"}, "needs a head and head is None"),
    ({"head": 3}, "head is a int; give a head's folder"),
    ({"rule": "typical"}, "no verification rule called 'typical'"),
    ({"streamer": Heard()}, "streamer is given for 4 rows"),
    ({"stop_strings": "x"}, "has no tokenizer to find them with"),
    ({"input_ids": torch.tensor([[1]])}, "input_ids is given twice"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_settings_that_are_not_built_in_are_refused(model, settings, message):
    with pytest.raises(ValueError, match=message):
        generate(model, batch(PROMPTS), **settings)


def test_a_models_own_settings_are_not_passed_over_either(model):
    before = model.generation_config
    try:
        model.generation_config = GenerationConfig(
            no_repeat_ngram_size=2, length_penalty=0.8, num_assistant_tokens=4, bos_token_id=1
        )
        with pytest.raises(
            ValueError,
            match=r"no_repeat_ngram_size is 2 in the model's generation_config.*"
            r"no_repeat_ngram_size=None turns it off",
        ):
            generate(model, batch(PROMPTS))
        found = generate(model, batch(PROMPTS), no_repeat_ngram_size=None, pad_token_id=0)
        assert found.shape == (4, 27)
    finally:
        model.generation_config = before


def test_sampling_settings_without_sampling_are_warned_of(model):
    with pytest.warns(UserWarning, match=r"temperature is 0\.5 and do_sample is off"):
        found = generate(model, batch(PROMPTS), temperature=0.5, max_new_tokens=4)
    assert torch.equal(found, generate(model, batch(PROMPTS), max_new_tokens=4))
    generate(model, batch(PROMPTS), temperature=1.0, top_k=50, top_p=1.0, max_new_tokens=1)


def test_inputs_that_are_not_text_are_refused(model):
    ids = torch.tensor([[5, 6, 7], [8, 9, 4]])
    mask = torch.tensor([[1, 0, 1], [1, 1, 1]])
    for inputs, message in (
        ("a text", "inputs is a str; give what a tokenizer returns"),
        ({"input_ids": [[5, 6]]}, "no input_ids of shape"),
        ({"input_ids": ids[0]}, "no input_ids of shape"),
        ({"input_ids": ids.float()}, "no input_ids of shape"),
        ({"input_ids": ids, "pixel_values": ids}, "inputs holds pixel_values; only texts"),
        ({"input_ids": ids, "token_type_ids": ids}, "inputs holds token_type_ids"),
        ({"input_ids": ids, "attention_mask": mask}, "row 0 of attention_mask has a hole"),
        ({"input_ids": ids, "attention_mask": mask[:1]}, r"of shape \[1, 3\]"),
        ({"input_ids": ids, "attention_mask": 0 * mask}, "row 0 is all padding"),
        (None, "no input_ids of shape"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(model, inputs)
    zero = {"input_ids": ids, "token_type_ids": torch.zeros_like(ids)}
    assert generate(model, zero, max_new_tokens=2).shape == (2, 5)
    with pytest.raises(ValueError, match="model is a str; give a transformers model"):
        generate("gpt2", ids)


def test_heads_that_do_not_fit_are_refused(model, tiny_target, tiny_head, drafts):
    loose = copy.deepcopy(tiny_head)
    loose.tables = None
    with pytest.raises(ValueError, match="head has no target tables"):
        generate(model, batch(PROMPTS), head=loose)
    with pytest.raises(ValueError, match="and a head is given; leave one of them out"):
        generate(model, batch(PROMPTS), head=tiny_head, draft="lookup:4")
    with pytest.raises(ValueError, match="a draft model drafts chains"):
        generate(model, batch(PROMPTS), **{**drafts["model"], "draft": "tree:2,2,4"})


def test_answers_of_unlike_lengths_need_a_pad(model, tokenizer):
    text = generate(model, batch(PROMPTS), max_new_tokens=20, eos_token_id=None)[0, 7:].tolist()
    before = model.generation_config
    try:
        model.generation_config = GenerationConfig()
        with pytest.raises(ValueError, match="pad_token_id is None; give a pad_token_id"):
            generate(
                model, batch(PROMPTS), max_new_tokens=20, tokenizer=tokenizer,
                stop_strings=PIECES[text[2]],
            )  # fmt: skip
    finally:
        model.generation_config = before


def test_an_outrider_target_does_as_well(tiny_target, tiny_head):
    target = Target.from_model(tiny_target.model)
    head = tiny_head.attach(tables(target))
    assert plan_named("chain:2").depth == 2
    found = generate(target, batch(PROMPTS), head=head, draft="chain:2", max_new_tokens=12)
    assert torch.equal(found, generate(target.model, batch(PROMPTS), max_new_tokens=12))
