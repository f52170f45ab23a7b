"""Where a text ends inside a block: end tokens, stop strings, the most tokens."""

from dataclasses import replace

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from outrider.eval.decode import Decoding, decode
from outrider.eval.drafters.replay import Replay
from outrider.eval.ending import Cut, Ending, StopStrings
from outrider.eval.rows.loop import decode_rows

PIECES = ["", "a", "b", "ab", "ba", " ", "aab", "b a", "<e>", "c", "bc", "\u00e9", *"def"]


@pytest.fixture(scope="module")
def tokenizer():
    """Pieces that overlap, so that one string has many spellings."""
    vocab = {piece or "<unk>": place for place, piece in enumerate(PIECES)}
    model = Tokenizer(BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    model.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>")


def first_by_text(ids, tokens, strings):
    """The slow reference: the text after each token, looked through from where the token begins."""
    for index in range(len(tokens)):
        before = "".join(PIECES[one] for one in [*ids, *tokens[:index]])
        text = before + PIECES[tokens[index]]
        for string in strings:
            start = text.find(string, max(0, len(before) - len(string) + 1))
            if start >= 0:
                return index
    return None


BLOCKS = [
    ([1, 2], [2, 2, 4, 5, 1]),
    ([], [6, 7, 1, 2, 9]),
    ([3, 3, 5], [1, 10, 9]),
    ([1], [2]),
    ([4, 4, 4], [4, 4, 4]),
    ([8, 8], [8, 11, 11]),
    ([5, 1], [2, 5, 1, 2, 9, 2]),
]


@pytest.mark.parametrize("strings", [["ab"], ["aba"], ["b a"], ["bb", "abc"], ["cb"], ["\u00e9"]])
def test_the_first_token_that_completes_a_string(tokenizer, strings):
    stops = StopStrings(tokenizer, strings)
    found = [stops.first(ids, tokens) for ids, tokens in BLOCKS]
    assert found == [first_by_text(ids, tokens, strings) for ids, tokens in BLOCKS]


def test_strings_span_tokens_blocks_and_the_prompt(tokenizer):
    stops = StopStrings(tokenizer, ["b ab"])
    assert stops.first([7], [2, 1]) == 0  # "b a" in the prompt, "b" to come
    assert stops.first([2, 5], [1, 2, 9]) == 1
    assert stops.first([2], [5, 3, 9]) == 1
    assert stops.first([7, 2], [9, 9]) is None  # all of it lies before the block


@pytest.mark.parametrize(
    ("eos", "strings", "room", "count", "finish"),
    [
        ((9,), (), 9, 4, "stop"),
        ((9,), (), 4, 4, "stop"),
        ((9,), (), 3, 3, "length"),
        ((), (), 9, 5, ""),
        ((), (), 5, 5, "length"),
        ((9,), ("ba",), 9, 3, "stop"),
        ((1,), ("ba",), 9, 3, "stop"),
        ((2,), ("ba",), 9, 2, "stop"),
        ((), ("ba",), 2, 2, "length"),
        ((), ("ba",), 3, 3, "stop"),
    ],
)
def test_whatever_comes_first_ends_the_text(
    tiny_target, tokenizer, eos, strings, room, count, finish
):
    target = replace(tiny_target, eos_ids=eos, tokenizer=tokenizer)
    ending = Ending(target, strings)
    assert ending.cut([3, 5], [5, 2, 1, 9, 5], room) == (count, finish)
    # Token by token it ends at the same place.
    ids, cut = [3, 5], Cut(0, "")
    for token in [5, 2, 1, 9, 5]:
        if not cut.finish:
            cut = ending.cut(ids, [token], room - len(ids) + 2)
            ids += [token]
    assert (len(ids) - 2, cut.finish) == (count, finish)


def test_end_tokens_may_be_ignored_and_strings_may_not(tiny_target, tokenizer):
    target = replace(tiny_target, eos_ids=(9,), tokenizer=tokenizer)
    assert Ending(target, ignore_eos=True).cut([], [9, 9], 5) == (2, "")
    assert Ending(target, ["c"], ignore_eos=True).cut([], [9, 9], 5) == (1, "stop")


def test_both_loops_end_at_a_string(tiny_target, known):
    target = tiny_target
    prompt = [5, 9, 14, 22]
    text = decode(target, prompt, None, Decoding(max_new_tokens=24, ignore_eos=True)).ids
    names = {token: f"[{token}]" for token in range(61)}
    # transformers' criterion spells "abcdef" to learn how the tokenizer joins its pieces.
    pieces = [*names.values(), *"abcdef"]
    vocab = {piece: place for place, piece in enumerate(pieces)}
    model = Tokenizer(BPE(vocab=vocab, merges=[], unk_token="[0]"))
    model.decoder = decoders.Fuse()
    named = PreTrainedTokenizerFast(tokenizer_object=model, unk_token="[0]")
    target = replace(tiny_target, tokenizer=named)
    # The end of one token, all of the next, the beginning of a third: the third is kept whole.
    place = 9
    string = names[text[place]][1:] + names[text[place + 1]] + "["
    decoding = Decoding(max_new_tokens=24, ignore_eos=True, stop_strings=(string,))
    wanted = text[: place + 3]
    whole = "".join(names[one] for one in text)
    assert whole.find(string) == len("".join(names[one] for one in text[:place])) + 1
    for length in (1, 3, 8):
        drafter = Replay([*prompt, *text], length)
        found = decode(target, prompt, drafter, decoding)
        assert (found.ids, found.finish) == (wanted, "stop")
        rows = known([[*prompt, *text]], length)
        (row,) = decode_rows(target, [prompt], rows, decoding, batch_size=1).done
        assert (row.new_ids, row.finish) == (wanted, "stop")


def test_strings_need_a_tokenizer_and_letters(tiny_target):
    with pytest.raises(ValueError, match=r"stop_strings is \['x'\].*has no tokenizer"):
        Ending(tiny_target, ["x"])
    with pytest.raises(ValueError, match="an empty one stops nothing"):
        Decoding(stop_strings=("a", ""))
    with pytest.raises(ValueError, match="prefill_chunk is 0; run at least 1 position"):
        Decoding(prefill_chunk=0)
