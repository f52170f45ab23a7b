"""A head whose chains are as long as a policy says, round by round."""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from outrider.data.sampling import draw
from outrider.data.target import Captured
from outrider.eval.drafters import Draft, Noise
from outrider.eval.drafters.head import HeadDrafter
from outrider.eval.policies.policy import Ahead, Judged, Oracle, Policy
from outrider.eval.trees.plans import ChainPlan
from outrider.eval.trees.tree import chain
from outrider.heads import DraftHead


class PolicyDrafter(HeadDrafter):
    """Drafts chains under a policy; the law that drafts come from is not changed by it.

    `draft_steps` counts the laws computed, those that were not drawn from too.
    """

    def __init__(self, head: DraftHead, policy: Policy, *, temperature: float = 0.0) -> None:
        if isinstance(policy, Oracle):
            raise ValueError(f"policy is {policy.label}: it knows the future; replay it on a trace")
        self._policy, self._state = policy, policy.begin()
        self._owns: list[float] | None = None
        self.draft_steps = 0
        super().__init__(head, ChainPlan(policy.most), temperature=temperature)

    @override
    def start(self, ids: Sequence[int], captured: Captured) -> None:
        """Begin a row; the state goes on if the policy says so."""
        self._owns = None
        if not self._policy.persists:
            self._state = self._policy.begin()
        super().start(ids, captured)

    @override
    def accept(self, ids: Sequence[int], captured: Captured) -> None:
        """Go on by these tokens, the last of which was not drafted."""
        if self._owns is not None:
            accepted = len(ids) - 1
            is_full = accepted == len(self._owns)
            judged = Judged(tuple(self._owns[: accepted + 1]), accepted, is_full)
            self._state = self._policy.after(self._state, judged)
        super().accept(ids, captured)

    @override
    @torch.no_grad()
    def propose(self, max_depth: int, noise: Noise) -> Draft:
        """Draft as far as the policy goes, within `max_depth` and the head's positions."""
        self._owns = []
        return super().propose(max_depth, noise)

    @override
    def _chain(self, hidden_1D: Tensor, depth: int, noise: Noise) -> Draft:
        assert self._owns is not None
        tokens: list[int] = []
        laws: list[Tensor] = []
        while len(tokens) < depth and self._policy.steps(
            self._state, len(tokens), self._owns[-1] if tokens else 0.0
        ):
            step = len(tokens)
            if step:
                row = self._num_rows + step - 1
                hidden_1D = self._step(hidden_1D[None], tokens[-1:], row, step)[0]
            logits_1W = self._head.draft_logits(hidden_1D, step)
            law_1W = (logits_1W.float() / (self._temperature or 1.0)).softmax(-1)
            self.draft_steps += 1
            entropy = float(torch.special.entr(law_1W).sum())
            if not self._policy.draws(self._state, Ahead(float(law_1W.max()), entropy)):
                break
            drawn = draw(law_1W[0], noise.draft(step)) if self._temperature else None
            draft_id = int(logits_1W.argmax()) if drawn is None else drawn
            laws.append(law_1W)
            self._owns.append(float(law_1W[0, draft_id]))
            tokens.append(int(self._ids_W[draft_id]))
        tree = chain(self._root, tokens)
        if not self._temperature:
            return Draft(tree)
        return Draft(tree, lambda node: self._head.scatter(laws[node - 1])[0])
