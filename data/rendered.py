"""Conversations that are rendered already: masked by the marker before the template's answers."""

import re

from outrider.data.chat import Encoded, Template


def encode_text(text: str, template: Template) -> Encoded:
    """A conversation that is rendered already: supervised are the spans after the answer marker."""
    opener = answer_marker(template)
    closers = [template.text([token]) for token in template.eos_ids]
    found = template.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = [int(token) for token in found["input_ids"]]
    mask = [0] * len(ids)
    pattern = re.escape(opener) + "(.*?(?:" + "|".join([*map(re.escape, closers), "$"]) + "))"
    for span in re.finditer(pattern, text, re.DOTALL):
        low, high = span.span(1)
        for place, (left, right) in enumerate(found["offset_mapping"]):
            if low <= left and right <= high and right > left:
                mask[place] = 1
    ends = [ids[i] for i in range(len(ids)) if mask[i] and ids[i] in template.eos_ids]
    return Encoded(ids, mask, turn=-1, end_ids=ends, spans=(("text", len(ids)),))


def answer_marker(template: Template) -> str:
    """The text that the template puts before every answer."""
    ask = [{"role": "user", "content": "x"}]
    closed = template.ids(ask, prompt=False)
    opened = template.ids(ask, prompt=True)
    marker = template.text(opened[len(closed) :])
    if opened[: len(closed)] != closed or not marker.strip():
        raise ValueError(
            "the target's template puts no marker before answers, so rendered text cannot be "
            "masked; give rows as messages"
        )
    return marker
