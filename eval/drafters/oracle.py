"""Drafts from the row's own answer: a ceiling, or a head of any acceptance that one names.

vLLM's `synthetic_acceptance_length` is the same idea. The answer is what plain decoding writes with
the same seed, so it depends on the coins that draw the text: only rules that keep the text, greedy
and match, are exact with these drafts.
"""

from collections.abc import Sequence

from outrider.data.target import Captured
from outrider.eval.drafters import Draft, Noise
from outrider.eval.rules import rule_named
from outrider.eval.rules.verdict import Siblings
from outrider.eval.trees.loop_plans import OraclePlan
from outrider.eval.trees.tree import chain


class OracleDrafter:
    """Drafts the known answer; the token at depth i is right with chance alpha_i.

    A wrong one is followed by right ones, whose places it has taken.
    """

    layers: tuple[int, ...] = ()
    siblings = Siblings.CHOSEN

    def __init__(self, plan: OraclePlan) -> None:
        self._plan = plan
        self._answers: dict[tuple[int, ...], list[int]] = {}

    def learn(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> None:
        """Note the answer to a prompt, in place of an earlier one."""
        self._answers[tuple(prompt_ids)] = list(answer_ids)

    def start(self, ids: Sequence[int], captured: Captured | None) -> None:  # noqa: ARG002
        """Begin a row. Raises ValueError for a prompt whose answer is not known."""
        prompt = tuple(ids[:-1])
        if prompt not in self._answers:
            raise ValueError(
                f"{self._plan.label} has no answer to this prompt of {len(prompt)} tokens; decode "
                "it plainly with the same settings and give the answer to learn()"
            )
        self._answer, self._place, self._root = self._answers[prompt], 1, ids[-1]

    def propose(self, max_depth: int, noise: Noise) -> Draft:
        """The next tokens of the answer, fewer at its end."""
        right = self._answer[self._place : self._place + min(self._plan.length, max_depth)]
        tokens = [
            token if noise.draft(depth) < self._plan.alpha(depth + 1) else _other(token)
            for depth, token in enumerate(right)
        ]
        return Draft(chain(self._root, tokens))

    def accept(self, ids: Sequence[int], captured: Captured | None) -> None:  # noqa: ARG002
        """Move on."""
        self._root, self._place = ids[-1], self._place + len(ids)


def check_oracle_rule(draft: str, rule: str | None) -> None:
    """Raises ValueError for a rule whose other coins would meet drafts that know the text."""
    if rule is not None and not rule_named(rule).keeps_text:
        raise ValueError(
            f"rule is {rule!r}, and {draft} drafts the draws of the text itself; judge these by "
            "greedy, or above temperature 0 by match"
        )


def _other(token: int) -> int:
    return token - 1 if token else 1
