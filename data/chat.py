"""Conversation -> token ids and the mask of what is supervised, by the target's own template.

Boundaries come from rendering: the prompt of an answer is the conversation before it, rendered with
the generation prompt; the answer is what rendering one message more adds. Both are compared as
*tokens*. Where a template rewrites history (thinking stripped from earlier turns), each answer
becomes a row of its own: what the model sees and says at that turn.
"""

from collections.abc import Sequence
from typing import NamedTuple

from outrider.data.messages import has_loss
from outrider.data.restated import restated
from outrider.data.said import lost_context, lost_parts, said_parts
from outrider.data.template import Message, Rendered, RowError, Template

__all__ = ["Encoded", "RowError", "Template", "encode"]


class Encoded(NamedTuple):
    """A row of tokens; mask 1 marks the tokens that are supervised."""

    ids: list[int]
    mask: list[int]
    turn: int
    """Number of the last answered message, counted from 0."""
    end_ids: list[int]
    """The end token trained at each supervised turn; missing where the template has none."""
    spans: tuple[tuple[str, int], ...] = ()
    """Whose tokens they are: (role, number of the token after its last), in order."""
    num_answers: int = 1
    """Supervised turns."""
    num_muted: int = 0
    """Answers of its conversation without loss, by the messages; told in the first row alone."""


class _Turn(NamedTuple):
    """One answer: the row up to its end, where the answer starts, where supervision ends."""

    index: int
    shown: Rendered
    start: int
    end: int
    is_rendered: bool = True
    """Whether the template wrote it so, from beginning to end."""

    @property
    def ids(self) -> list[int]:
        """Tokens of the row."""
        return self.shown.ids


def encode(messages: Sequence[Message], template: Template, tools: object = None) -> list[Encoded]:
    """One row for the conversation, or one per answer where the template rewrites history.

    Raises RowError where a row would not be what the model sees and says.
    """
    answers = _answers(messages)
    indices = [index for index in answers if has_loss(messages[index], index)]
    if not indices:
        raise RowError("every answer has weight 0 or train false, so there is nothing to train on")
    turns = [_turn(messages, index, template, tools) for index in indices]
    whole = turns[-1].ids
    if all(turn.ids[: turn.end] == whole[: turn.end] for turn in turns):
        groups = [turns]
    else:
        groups = [[turn] for turn in turns]
    rows = [_row(group, messages, template, tools) for group in groups]
    return [rows[0]._replace(num_muted=len(answers) - len(indices)), *rows[1:]]


def _answers(messages: Sequence[Message]) -> list[int]:
    """The answers: assistant messages that reply to something."""
    asked = False
    found: list[int] = []
    for index, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str):
            raise RowError(f"message {index} has no role")
        if role == "assistant" and asked:
            found.append(index)
        asked = asked or role not in ("assistant", "system", "developer")
    if not found:
        raise RowError("no assistant message answers a user message")
    return found


def check_context(messages: Sequence[Message], prompt: str) -> None:
    """RowError where a rendered prompt lacks a message that its answer replies to."""
    lost = lost_context(messages, prompt)
    if lost is not None:
        number, part = lost
        raise RowError(
            f"message {number} ({messages[number].get('role')}) is left out by the chat template "
            f"({part[:60]!r}), so the answer would be to something that the model does not see; "
            "take the message out, or give the target a template that shows it"
        )


def _turn(messages: Sequence[Message], index: int, template: Template, tools: object) -> _Turn:
    message = messages[index]
    if not any(said_parts(message)):
        raise RowError(f"message {index} is an empty answer")
    prompt = template.render(messages[:index], tools, prompt=True)
    shown = template.render(messages[: index + 1], tools, prompt=False)
    bos = template.tokenizer.bos_token_id
    if bos is not None and shown.ids[:2] == [bos, bos]:
        raise RowError("the row begins with the BOS token twice; take it out of the messages")
    start = len(prompt.ids)
    problem = _problem(messages, index, prompt, shown, template, tools)
    if problem is not None:
        again = restated(messages[: index + 1], prompt, shown, template, tools)
        if again is None:
            raise RowError(
                f"message {index}: {problem}; change the row, or let the target answer (outrider "
                "generate), whose rows need no rendering"
            )
        shown = again
    end = start + _answer_length(shown.ids[start:], template)
    return _Turn(index, shown, start, end, is_rendered=problem is None)


def _problem(
    messages: Sequence[Message],
    index: int,
    prompt: Rendered,
    shown: Rendered,
    template: Template,
    tools: object,
) -> str | None:
    """Why the rendered turn is not what the model would say; None when it is."""
    start = len(prompt.ids)
    if shown.ids[:start] != prompt.ids:
        return (
            "rendered with its answer, the prompt's tokens differ from what the model sees when it "
            "is asked, so this template cannot show what the model would say"
        )
    lost = lost_parts(messages[index], template.text(shown.ids[start:]))
    if lost:  # some generation prompts open the thinking that the answer goes on with
        before = template.ids(messages[:index], tools, prompt=False)
        if shown.ids[: len(before)] == before:
            lost = lost_parts(messages[index], template.text(shown.ids[len(before) :]))
    if lost:
        return (
            f"the template removes part of the answer ({lost[0][:60]!r}), so the row would not be "
            "what the model says"
        )
    return None


def _answer_length(region: list[int], template: Template) -> int:
    """Tokens of the answer up to the first one at which generation stops, that one included.

    What the template adds after it, a line break or an end of text, the model never says. Raises
    RowError when the answer itself goes on after it.
    """
    length = len(region)
    while length and not template.text([region[length - 1]]).strip():
        length -= 1
    end = next((place for place, token in enumerate(region) if token in template.eos_ids), None)
    if end is None:
        return length
    if not template.special_ids.issuperset(region[end + 1 : length]):
        raise RowError(
            f"the answer goes on after {template.text([region[end]])}, at which generation stops; "
            "split it, or take that token out"
        )
    return end + 1


def _row(
    turns: list[_Turn], messages: Sequence[Message], template: Template, tools: object
) -> Encoded:
    last = turns[-1]
    check_context(messages[: last.index], template.text(last.ids[: last.start]))
    mask = [0] * len(last.ids)
    for turn in turns:
        mask[turn.start : turn.end] = [1] * (turn.end - turn.start)
    tags = template.tagged(messages[: last.index + 1], tools) if last.is_rendered else None
    if tags is not None:
        mask = _cross_check(mask, tags, turns, _untrained(turns, messages, template, tools))
    ends = [turn.ids[turn.end - 1] for turn in turns]
    return Encoded(
        last.ids,
        mask,
        last.index,
        [token for token in ends if token in template.special_ids],
        _spans(last.shown, messages[: last.index + 1], template, tools),
        len(turns),
    )


def _spans(
    shown: Rendered, messages: Sequence[Message], template: Template, tools: object
) -> tuple[tuple[str, int], ...]:
    """Whose tokens they are; what a template writes before a message counts as that message's.

    Where two messages cannot be told apart, as where history is rewritten, both are named.
    """
    spans: list[tuple[str, int]] = []
    place, roles = 0, list[str]()
    for number, message in enumerate(messages[:-1], start=1):
        if message["role"] not in roles:
            roles.append(str(message["role"]))
        if messages[number]["role"] == message["role"] or not shown.offsets:
            continue
        end = _text_end(shown.text, messages[:number], template, tools)
        if end is not None:
            while place < len(shown.ids) and shown.offsets[place][1] <= end:
                place += 1
            spans.append(("+".join(roles), place))
            roles = list[str]()
    if messages[-1]["role"] not in roles:
        roles.append(str(messages[-1]["role"]))
    return (*spans, ("+".join(roles), len(shown.ids)))


def _text_end(
    whole: str, messages: Sequence[Message], template: Template, tools: object
) -> int | None:
    """Where the first messages end in the text of all; None when it does not begin with theirs."""
    try:
        text = template.write(messages, tools, prompt=False)
    except RowError:
        return None
    closers = ("", *(template.text([token]) for token in template.eos_ids))
    ends = [text.removesuffix(closer) for closer in closers]  # some write an end of text after all
    return next((len(end) for end in ends if whole.startswith(end)), None)


def _untrained(
    turns: list[_Turn], messages: Sequence[Message], template: Template, tools: object
) -> list[range]:
    """Where answers stand that this row does not train: before its first, and muted ones later."""
    first, places = turns[0], list[range]()
    if any(message.get("role") == "assistant" for message in messages[: first.index]):
        places.append(range(first.start))
    trained = [turn.index for turn in turns]
    for index in range(first.index, turns[-1].index):
        if messages[index].get("role") == "assistant" and index not in trained:
            ends = [
                len(template.ids(messages[:number], tools, prompt=False))
                for number in (index, index + 1)
            ]
            places.append(range(*ends))
    return places


def _cross_check(
    mask: list[int], tags: list[int], turns: list[_Turn], untrained: list[range]
) -> list[int]:
    """The template's tags decide inside an answer; the turn end is supervised in any case.

    What they mark of `untrained` answers says nothing.
    """
    allowed = set[int]().union(*untrained, *(range(one.start, len(one.ids)) for one in turns))
    astray = [place for place, tag in enumerate(tags) if tag and place not in allowed]
    if astray:
        raise RowError(
            f"the template's generation tags mark token {astray[0]}, which is outside every answer "
            f"by its own rendering; correct the template"
        )
    both = [marked * tagged for marked, tagged in zip(mask, tags, strict=True)]
    for turn in turns:
        if not any(both[turn.start : turn.end]):
            raise RowError(
                f"message {turn.index}: the template's generation tags leave the answer unmarked; "
                f"correct the template"
            )
        both[turn.end - 1] = 1
    return both
