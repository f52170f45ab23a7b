"""A tiny random target, text of its own, and a head that has learned it from other text."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.data.penalties import Prefix
from outrider.data.sampling import Sampling, process
from outrider.data.target import Captured, Target
from outrider.eval.decode import Decoded, Decoding, decode
from outrider.eval.drafters import Draft, Noise
from outrider.eval.drafters.head import HeadDrafter
from outrider.eval.link import tables
from outrider.eval.noise import KeyedNoise
from outrider.eval.offline.chain import score_chain
from outrider.eval.offline.scores import Score
from outrider.eval.offline.texts import Text
from outrider.eval.offline.traces import Trace
from outrider.eval.offline.tree import score_tree
from outrider.eval.rows import EachRow
from outrider.eval.rules.verdict import Siblings
from outrider.eval.trees.plans import ChainPlan, TreePlan, plan_named
from outrider.eval.trees.tree import Tree, chain
from outrider.heads import (
    CONFIGS,
    HEADS,
    DraftHead,
    EagleConfig,
    EagleHead,
    RowPlan,
    States,
    save_head,
)
from outrider.heads.fused import score_pairs, teacher_of

VOCAB, EOS, LAYERS = 61, 3, (1, 3, 5)
MakeTexts = Callable[..., list[Text]]


@pytest.fixture(scope="session")
def tiny_target() -> Target:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=EOS,
        tie_word_embeddings=False,
        initializer_range=0.08,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        # Strong tables over weak layers: peaked laws that depend mostly on the last tokens.
        model.model.embed_tokens.weight.mul_(6)
        model.lm_head.weight.mul_(8)
    return Target.from_model(model)


def answers(
    target: Target, prompts: list[list[int]], sampling: Sampling, length: int
) -> list[list[int]]:
    """Plain decoding without a cache: the simplest reference. Noise is keyed by row, seed 0."""
    rows = [list(prompt) for prompt in prompts]
    for _ in range(length):
        ids_BT = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], True)
        last_BTH = target.run(ids_BT).last_BTH
        last_BH = last_BTH[range(len(rows)), [len(row) - 1 for row in rows]]
        prefixes = [Prefix(row, len(prompt)) for row, prompt in zip(rows, prompts, strict=True)]
        probs_BV = process(target.logits(last_BH), sampling, prefixes)
        for b, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
            if len(row) == len(prompt) or row[-1] != EOS:
                row.append(KeyedNoise(0, b, len(row)).draw(0, probs_BV[b]))
    return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]


@pytest.fixture(scope="session")
def make_texts(tiny_target: Target) -> MakeTexts:
    def make(sampling: Sampling, count: int, length: int = 24, seed: int = 7) -> list[Text]:
        generator = torch.Generator().manual_seed(seed)
        sizes = torch.randint(4, 9, (count,), generator=generator).tolist()
        prompts = [torch.randint(4, VOCAB, (n,), generator=generator).tolist() for n in sizes]
        found = answers(tiny_target, prompts, sampling, length)
        kinds = ("chat", "code")
        return [Text(f"row-{i}", kinds[i % 2], prompts[i], found[i]) for i in range(count)]

    return make


@pytest.fixture(scope="session")
def greedy_texts(make_texts: MakeTexts) -> list[Text]:
    return make_texts(Sampling(), 20)


@pytest.fixture(scope="session")
def sampled_texts(make_texts: MakeTexts) -> list[Text]:
    return make_texts(Sampling(temperature=1.0), 40)


@pytest.fixture(scope="session")
def tiny_head(tiny_target: Target, make_texts: MakeTexts) -> EagleHead:
    torch.manual_seed(1)
    # Not the texts that it is judged on: it would know those by heart.
    texts = make_texts(Sampling(temperature=1.0), 200, seed=8)
    config = EagleConfig.from_target(
        tiny_target.config, aux_layers=LAYERS, draft_vocab_size=48, tokenizer_size=VOCAB
    )
    head = EagleHead(config, torch.arange(3, 51)).attach(tables(tiny_target))
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2, weight_decay=0.0)
    rows = [torch.tensor(text.prompt_ids + text.answer_ids) for text in texts]
    ids_BT = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    captured = tiny_target.run(ids_BT, layers=LAYERS)
    law_BTW = tiny_target.logits(captured.last_BTH[:, 1:-1]).softmax(-1)[..., 3:51]
    for step in range(80):
        chosen = torch.arange(step % 4, len(texts), 4)
        feature = head.project(captured.aux_BTF[chosen, :-2], None)
        position = torch.arange(feature.shape[1])[None]
        hidden = head.step(feature, ids_BT[chosen, 1:-1], position)
        logp = F.log_softmax(head.draft_logits(hidden), -1)
        loss = -(law_BTW[chosen] * logp).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head.eval().requires_grad_(requires_grad=False)


@pytest.fixture(scope="session")
def write_files(tiny_target: Target, tiny_head: EagleHead) -> Callable[[Path], None]:
    """Writes the target with a tokenizer of words, the trained head and a fresh one like it."""

    def write(root: Path) -> None:
        tiny_target.model.save_pretrained(root / "target")
        words = Tokenizer(WordLevel({f"w{i}": i for i in range(61)}, unk_token="w0"))
        words.pre_tokenizer = WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w3")
        tokenizer.save_pretrained(root / "target")
        save_head(tiny_head, root / "run" / "good")
        fresh = EagleHead(tiny_head.config, tiny_head.draft_ids_W.clone())
        save_head(fresh, root / "run" / "fresh")

    return write


@pytest.fixture(scope="session")
def train_head() -> Callable[..., DraftHead]:
    """Trains a head of any kind for a few steps."""

    def train(
        target: Target,
        texts: list[Text],
        settings: dict[str, Any],
        draft_ids_W: torch.Tensor,
        *,
        num_steps: int,
        rows_a_step: int,
        lr: float = 1e-2,
    ) -> DraftHead:
        torch.manual_seed(1)
        kind = settings["kind"]
        sizes = {"tokenizer_size": target.tokenizer_size, **settings}
        config = CONFIGS[kind].from_target(target.config, **sizes)
        head = HEADS[kind](config, draft_ids_W if config.is_reduced else None)
        head.attach(tables(target)).start_from_target()
        optimizer = torch.optim.AdamW(head.parameters(), lr=lr, weight_decay=0.0)
        rows = [torch.tensor(text.prompt_ids + text.answer_ids) for text in texts]
        for step in range(num_steps):
            chosen = [rows[(step * rows_a_step + i) % len(rows)] for i in range(rows_a_step)]
            ids_BT = torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True)
            position_BT = torch.arange(ids_BT.shape[1]).expand(ids_BT.shape)
            lengths_B1 = torch.tensor([[len(row)] for row in chosen])
            document_BT = (position_BT < lengths_B1).long()
            captured = target.run(ids_BT, layers=config.aux_layers)
            last_BTH = captured.last_BTH
            inside_BT = torch.isin(ids_BT, head.draft_ids_W) & (document_BT > 0)
            plan = RowPlan.from_mask(inside_BT, document_BT, min(4, config.max_drafts))
            states = States(captured.aux_BTF, last_BTH, ids_BT, position_BT)
            scored = score_pairs(
                head.predict(states, plan).output_PKD,
                head.output_weights(),
                teacher_of(head, last_BTH.flatten(0, 1)[plan.predicted_P - 1], torch.float32),
                plan.valid_PK * 1.0,
            )
            optimizer.zero_grad()
            (scored.loss / plan.valid_PK.sum()).backward()
            optimizer.step()
        return head.eval().requires_grad_(requires_grad=False)

    return train


@pytest.fixture(scope="session")
def loop() -> Callable[..., list[Decoded]]:
    """Decodes every prompt with the noise that its text was made with."""

    def run(
        target: Target, head: DraftHead, texts: Sequence[Text], draft: str, decoding: Decoding
    ) -> list[Decoded]:
        temperature = decoding.sampling.temperature if decoding.rule == "rejection" else 0.0
        return [
            decode(
                target,
                text.prompt_ids,
                HeadDrafter(head, plan_named(draft), temperature=temperature),
                decoding,
                row=int(text.row_id.split("-")[1]),
            )
            for text in texts
        ]

    return run


@pytest.fixture(scope="session")
def offline() -> Callable[..., Score]:
    """Scores a chain or a tree on a trace."""

    def score(head: DraftHead, trace: Trace, target: Target, draft: str, rule: str) -> Score:
        plan = plan_named(draft)
        if isinstance(plan, TreePlan):
            return score_tree(head, trace, target, plan, rule=rule)
        assert isinstance(plan, ChainPlan)
        return score_chain(head, trace, target, lengths=[plan.length], rule=rule)[plan.length]

    return score


class Known:
    """Drafts the rest of whichever of the given texts a row is.

    Shapes: `chain` is right, `wrong` never, `mixed` wrong at every third place, `uneven` of unlike
    lengths, `forks` a tree with the right token behind a wrong sibling.
    """

    layers = ()
    siblings = Siblings.CHOSEN

    def __init__(self, texts: Sequence[Sequence[int]], length: int, shape: str) -> None:
        self._texts, self._length, self._shape = texts, length, shape

    def start(self, ids: Sequence[int], captured: Captured) -> None:
        fits = [text for text in self._texts if list(text[: len(ids) - 1]) == list(ids[:-1])]
        self._text, self._root, self._place = fits[0], ids[-1], len(ids)

    def accept(self, ids: Sequence[int], captured: Captured) -> None:
        self._root, self._place = ids[-1], self._place + len(ids)

    def propose(self, max_depth: int, noise: Noise) -> Draft:
        length = self._length
        if self._shape == "uneven":
            length = (self._place * 7) % (length + 1)
        path = list(self._text[self._place : self._place + min(length, max_depth)])
        if self._shape in ("wrong", "mixed"):
            every = 1 if self._shape == "wrong" else 3
            places = range(self._place, self._place + len(path))
            path = [
                (token + (place % every == 0)) % VOCAB
                for token, place in zip(path, places, strict=True)
            ]
        if self._shape != "forks":
            return Draft(chain(self._root, path))
        tokens, parents, parent = [self._root], [-1], 0
        for token in path:
            tokens += [(token + 1) % VOCAB, token]
            parents += [parent, parent]
            parent = len(tokens) - 1
        return Draft(Tree(tuple(tokens), tuple(parents)))


@pytest.fixture(scope="session")
def known() -> Callable[..., EachRow]:
    """Drafts for a batch along texts that are known: `known(texts, length, shape)`."""
    return lambda texts, length=4, shape="chain": EachRow(lambda: Known(texts, length, shape))
