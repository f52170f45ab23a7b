"""Drafts by a model of another tokenizer: seams between the two, its cache, its ends and limits."""

import copy
import random

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.data.target import Target
from outrider.eval.decode import Decoding, decode
from outrider.eval.drafters.retoken import IdsOf, TextOf, continued, decoded
from outrider.eval.drafters.universal import UniversalDrafter, as_text_model
from outrider.eval.trees.loop_plans import UniversalPlan

CORPUS = [
    "the cat sat on the mat, and the dog sat on the cat",
    "def add(one, other):\n    return one + other\n",
    "naïve café: 12 € für 3 Stück, 日本語 と 🙂🙂",
] * 3


def bpe(vocab_size, *, metaspace=False, bos=None):
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>" if metaspace else None))
    special = ["<s>", "</s>", "<unk>", "<|end|>"]
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=special, show_progress=False
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
    tokenizer.train_from_iterator(CORPUS, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", bos_token=bos)
    return made


def model_for(tokenizer, seed, **settings):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=1,
        bos_token_id=0,
        tie_word_embeddings=False,
        initializer_range=0.2,
        **{"max_position_embeddings": 256, **settings},
    )
    return Target.from_model(LlamaForCausalLM(config).double(), tokenizer)


@pytest.fixture(scope="module")
def small():
    return bpe(290)


@pytest.fixture(scope="module")
def large():
    return bpe(340)


@pytest.fixture(scope="module")
def target(large):
    return model_for(large, 0)


def pieces(rng, count):
    """Words, code, marks and characters of one to four bytes, joined in any order."""
    parts = [
        "the",
        " cat",
        " sat",
        "\n    ",
        "return",
        " one",
        "naï",
        "ve",
        " €",
        "日本",
        "🙂",
        "12",
    ]
    return "".join(rng.choice(parts) for _ in range(count))


def test_text_grows_as_its_ids_do_and_waits_inside_a_character(small, large):
    rng = random.Random(0)
    halves = 0
    for tokenizer in (small, large, bpe(120, metaspace=True)):
        for _ in range(20):
            text = pieces(rng, 30)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            grown, place = TextOf(tokenizer), 0
            while place < len(ids):
                size = rng.randrange(1, 5)
                grown.add(ids[place : place + size])
                place += size
                whole = decoded(tokenizer, ids[:place])
                assert grown.is_whole == (not whole.endswith("\ufffd"))
                if grown.is_whole:
                    assert grown.text == whole
                else:
                    assert whole.startswith(grown.text)
                    halves += 1
            assert grown.text == decoded(tokenizer, ids)
    assert halves > 10


@pytest.mark.parametrize("kind", ["small", "large", "metaspace", "bos"])
def test_ids_of_a_growing_text_are_those_of_the_whole(kind):
    made = {
        "small": lambda: bpe(290),
        "large": lambda: bpe(340),
        "metaspace": lambda: bpe(120, metaspace=True),
        "bos": lambda: bpe(290, bos="<s>"),
    }
    tokenizer, rng, seams = made[kind](), random.Random(1), 0
    for _ in range(20):
        ids, text = IdsOf(tokenizer), ""
        for _ in range(25):
            text += pieces(rng, rng.randrange(0, 4))
            before = len(ids.ids)
            ids.become(text)
            wanted = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert ids.ids == wanted
            seams += before < len(wanted)
    assert seams > 200


def test_the_start_token_comes_first_where_the_tokenizer_adds_one(small):
    from tokenizers.processors import TemplateProcessing

    tokenizer = bpe(290, bos="<s>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    ids = IdsOf(tokenizer)
    assert ids.ids == [0]
    ids.become("the cat")
    assert ids.ids == [0, *small("the cat", add_special_tokens=False)["input_ids"]]


def test_what_is_said_further_keeps_the_ids_that_were_written(small, large):
    rng, found, odd = random.Random(2), 0, 0
    for tokenizer in (small, large):
        for _ in range(200):
            ids = tokenizer(pieces(rng, 8), add_special_tokens=False)["input_ids"]
            if rng.random() < 0.3:
                # As a model may write: not how the tokenizer splits it.
                ids += [one for char in " cat" for one in tokenizer(char)["input_ids"]]
                odd += 1
            if decoded(tokenizer, ids).endswith("\ufffd"):
                continue
            more = pieces(rng, 3)
            new = continued(tokenizer, ids, more)
            assert decoded(tokenizer, [*ids, *new]) == decoded(tokenizer, ids) + more
            found += 1
    assert found > 300
    assert odd > 50


def test_a_seam_inside_a_token_is_said_by_other_tokens(large):
    """ "the" is one token; after "t" alone its rest is still said, and "t" is kept."""
    whole = large("the", add_special_tokens=False)["input_ids"]
    assert len(whole) == 1
    ids = large("t", add_special_tokens=False)["input_ids"]
    new = continued(large, ids, "he")
    assert new
    assert decoded(large, [*ids, *new]) == "the"


def drafted_anew(model, target, ids, length):
    """The drafts by whole encodings and whole passes."""
    ours, theirs = model.tokenizer, target.tokenizer
    text = decoded(theirs, ids)
    if text.endswith("\ufffd"):
        return []
    own = ours(text, add_special_tokens=False)["input_ids"]
    new = []
    while len(new) < length and model.eos_ids[0] not in new:
        logits = model.logits(model.run(torch.tensor([[*own, *new]])).last_BTH[0, -1])
        new.append(int(logits.argmax()))
    said = [token for token in new if token not in model.eos_ids]
    more = decoded(ours, said).rstrip("\ufffd")
    tokens = continued(theirs, ids, more) if more else []
    if len(said) < len(new) and (tokens or not more):
        tokens = [*tokens, target.eos_ids[0]]
    return tokens[:length]


def test_drafts_are_those_of_whole_encodings_and_whole_passes(small, target):
    model = model_for(small, 1)
    drafter = UniversalDrafter(as_text_model(model, target), UniversalPlan(5))
    rng, drafts = random.Random(3), 0
    for _ in range(3):
        ids = target.tokenizer(pieces(rng, 4))["input_ids"]
        drafter.start(ids, None)
        for _ in range(8):
            tokens = list(drafter.propose(99, None).tree.tokens)
            assert tokens == [ids[-1], *drafted_anew(model, target, ids, 5)]
            assert list(drafter.propose(2, None).tree.tokens) == tokens[:3]
            drafts += len(tokens) - 1
            # Some of them stand, then something else comes.
            new = tokens[1 : rng.randrange(1, 1 + len(tokens))]
            new += target.tokenizer(pieces(rng, 1))["input_ids"][: rng.randrange(1, 3)]
            drafter.accept(new, None)
            ids = [*ids, *new]
    assert drafts > 40


def test_the_text_is_plain_decodings_and_counts_are_the_targets(small, target):
    model = model_for(small, 1)
    for prompt in (target.tokenizer("the cat sat")["input_ids"], [70]):
        decoding = Decoding(max_new_tokens=40, ignore_eos=True)
        plain = decode(target, prompt, None, decoding)
        drafter = UniversalDrafter(as_text_model(model, target), UniversalPlan(4))
        found = decode(target, prompt, drafter, decoding)
        assert found.ids == plain.ids
        assert max(one.drafted for one in found.rounds) <= 4
        assert sum(one.drafted for one in found.rounds) > 0


def test_a_model_of_the_same_tokenizer_drafts_the_targets_own_tokens(target, large):
    """The target drafts for itself by way of text, from prompts split as it would split them."""
    drafter, told = UniversalDrafter(as_text_model(target, target), UniversalPlan(1)), 0
    for said in ("the cat sat on the mat, and", "def add", "12 €", "naïve", " one + other", "cat"):
        ids = large(said)["input_ids"]
        drafter.start(ids, None)
        best = int(target.logits(target.run(torch.tensor([ids])).last_BTH[0, -1]).argmax())
        word = decoded(large, [best])
        # Where its token is text, and the tokenizer splits the whole as the model has written it.
        if not word.endswith("\ufffd") and large(said + word)["input_ids"] == [*ids, best]:
            assert drafter.propose(9, None).tree.tokens == (ids[-1], best)
            told += 1
    assert told > 1


def always(model, token):
    """The model, saying one token whatever comes."""
    made = copy.deepcopy(model.model)
    with torch.no_grad():
        made.model.norm.weight.zero_()
    found = Target.from_model(made, model.tokenizer)
    bias = torch.zeros(found.vocab_size, dtype=found.dtype)
    bias[token] = 1.0
    object.__setattr__(found, "logits", lambda hidden: hidden.sum(-1, keepdim=True) * 0 + bias)
    return found


def test_the_models_end_token_is_the_targets(small, target):
    ending = always(model_for(small, 1), 1)
    drafter = UniversalDrafter(as_text_model(ending, target), UniversalPlan(4))
    drafter.start([70, 71], None)
    assert drafter.propose(9, None).tree.tokens == (71, target.eos_ids[0])


def test_nothing_is_drafted_inside_a_character_or_past_the_models_positions(small, target):
    drafter = UniversalDrafter(
        as_text_model(always(model_for(small, 1), small("t")["input_ids"][0]), target),
        UniversalPlan(4),
    )
    face = target.tokenizer("🙃")["input_ids"]
    assert len(face) > 1
    drafter.start([70, *face[:-1]], None)
    assert len(drafter.propose(9, None).tree) == 1
    drafter.accept(face[-1:], None)
    assert len(drafter.propose(9, None).tree) > 1

    text = target.tokenizer("12 12 12 12")["input_ids"]
    # Drafts are run up to the last position: the newest one need not be.
    length = len(small("12 12 12 12")["input_ids"])
    for positions, drafted in ((length + 1, True), (length, True), (length - 1, False)):
        short = model_for(small, 1, max_position_embeddings=positions)
        drafter = UniversalDrafter(as_text_model(short, target), UniversalPlan(4))
        drafter.start(text, None)
        drafter.propose(9, None)
        assert drafter._cache.get_seq_length() == (positions if drafted else 0)


def test_models_without_a_tokenizer_are_refused(target, tiny_target):
    with pytest.raises(ValueError, match="in-memory has no tokenizer; drafts pass from one"):
        as_text_model(tiny_target, target)
    with pytest.raises(ValueError, match="in-memory has no tokenizer"):
        as_text_model(target, tiny_target)
