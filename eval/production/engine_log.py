"""Reads what vLLM and SGLang say of acceptance: metrics text, log lines, and answers' meta data.

vLLM (0.32.0, `v1/spec_decode/metrics.py`) counts drafts, draft tokens and accepted tokens, in all
and per position, since its start, and logs a line with the figures since the last. It counts what
was accepted past the end of an answer. Where its drafts are of unlike lengths (a schedule by batch
size) how many were judged behind the first position is not told. SGLang's metrics are averages
without counts, so they can be shown and not tested; its log lines are averages over
`decode_log_interval` steps; the `meta_info` of its answers has a request's histogram of accepted
drafts, cut at the end of the answer, the round's own token always taken off
(`spec_correct_drafts_histogram`, older `spec_accept_histogram`).
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.eval.production.window import Window


def read_windows(sources: Sequence[tuple[str, str]], *, log_interval: int = 40) -> list[Window]:
    """Windows of all sources (name and text), each source's form told by its content.

    Metrics texts are scrapes of counters, in order: the first gives a window since the engine's
    start, each later one a window since the one before.

    Args:
        sources: Names and texts.
        log_interval: SGLang's `--decode-log-interval`, to guess the calls behind a line.

    Raises ValueError for a source in which neither engine's figures are found.
    """
    found: list[Window] = []
    scrapes: list[tuple[str, str]] = []
    for name, text in sources:
        if _METRIC.search(text):
            scrapes.append((name, text))
            continue
        windows = [
            *_vllm_lines(name, text),
            *_sglang_lines(name, text, log_interval),
            *_sglang_answers(name, text),
        ]
        if not windows:
            raise ValueError(
                f"{name} holds no figures of speculative decoding; give vLLM's or SGLang's metrics "
                "text, a log with lines 'SpecDecoding metrics:' or 'Decode batch ... accept len:', "
                "or JSON lines of SGLang's answers with meta_info"
            )
        found += windows
    return [*_from_scrapes(scrapes), *found]


# Metrics text

_METRIC = re.compile(r"^(?:vllm:spec_decode_num_|sglang:spec_accept_)", re.MULTILINE)
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_OWN = ("position", "finished_reason", "le")
_CUT_SHARE = 0.02
_UNLIKE = "drafts of unlike lengths: only the first position is tested"


@dataclass
class _Counters:
    """Counters of one route in one scrape."""

    drafts: float = 0.0
    tokens: float | None = None
    accepted: float = 0.0
    at: dict[int, float] = field(default_factory=dict)
    requests: float | None = None

    def less(self, before: "_Counters") -> "_Counters":
        """What was counted since; all of it when the engine started anew in between."""
        fell = self.drafts < before.drafts or self.accepted < before.accepted
        if fell or any(self.at.get(i, 0.0) < value for i, value in before.at.items()):
            return self
        requests = None if self.requests is None else self.requests - (before.requests or 0.0)
        tokens = None if self.tokens is None else self.tokens - (before.tokens or 0.0)
        at = {i: value - before.at.get(i, 0.0) for i, value in self.at.items()}
        drafts, accepted = self.drafts - before.drafts, self.accepted - before.accepted
        return _Counters(drafts, tokens, accepted, at, requests)

    @property
    def has_one_length(self) -> bool:
        """Whether drafts are as long as there are positions; ends of answers may cut a few."""
        whole = self.drafts * len(self.at)
        return self.tokens is None or self.tokens >= (1 - _CUT_SHARE) * whole


def _from_scrapes(scrapes: Sequence[tuple[str, str]]) -> Iterator[Window]:
    known: dict[str, _Counters] = {}
    for number, (name, text) in enumerate(scrapes):
        yield from _sglang_gauges(name, text)
        for route, counters in _counters(text).items():
            new = counters.less(known.get(route, _Counters()))
            known[route] = counters
            if new.drafts:
                yield Window(
                    engine="vllm",
                    route=route,
                    when=f"to {name}" if number == 0 else f"{scrapes[number - 1][0]} to {name}",
                    rounds=new.drafts,
                    accepted=new.accepted,
                    accepted_at=tuple(new.at[i] for i in sorted(new.at)),
                    requests=new.requests,
                    has_one_length=new.has_one_length,
                    notes=() if new.has_one_length else (_UNLIKE,),
                )


def _samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    for name, labels, value in _SAMPLE.findall(text):
        try:
            yield name, dict(_LABEL.findall(labels)), float(value)
        except ValueError:  # a comment or a line of another format
            continue


def _route(labels: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items()) if key not in _OWN)


def _counters(text: str) -> dict[str, _Counters]:
    routes: dict[str, _Counters] = {}
    for full, labels, value in _samples(text):
        name = full.removesuffix("_total")
        if name not in _READ:
            continue
        one = routes.setdefault(_route(labels), _Counters())
        if name == "vllm:spec_decode_num_drafts":
            one.drafts += value
        elif name == "vllm:spec_decode_num_draft_tokens":
            one.tokens = (one.tokens or 0.0) + value
        elif name == "vllm:spec_decode_num_accepted_tokens":
            one.accepted += value
        elif name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            place = _position(labels, full)
            one.at[place] = one.at.get(place, 0.0) + value
        else:
            one.requests = (one.requests or 0.0) + value
    return {route: one for route, one in routes.items() if one.drafts or one.at}


def _position(labels: Mapping[str, str], metric: str) -> int:
    told = labels.get("position", "")
    if not told.isdecimal():
        raise ValueError(
            f"{metric} has the labels {dict(labels)}; give metrics text whose position is a number"
        )
    return int(told)


_READ = (
    "vllm:spec_decode_num_drafts",
    "vllm:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens",
    "vllm:spec_decode_num_accepted_tokens_per_pos",
    "vllm:request_success",
)


def _sglang_gauges(name: str, text: str) -> Iterator[Window]:
    for metric, labels, value in _samples(text):
        if metric == "sglang:spec_accept_length" and value > 0:
            yield Window(
                engine="sglang",
                route=_route(labels),
                when=f"at {name}",
                rounds=0.0,
                accepted=0.0,
                length=value,
                notes=("an average of the last steps without counts: not tested",),
            )


# Log lines

_VLLM_LINE = re.compile(r"^(.*?)SpecDecoding metrics: (.*)$", re.MULTILINE)
_SGLANG_LINE = re.compile(
    r"^(.*?)Decode batch.*?#running-req: (\d+).*?accept len: (\d+(?:\.\d+)?)", re.M
)
_TIME = re.compile(r"(?:\d{4}-)?\d{2}-\d{2}[ T]\d{2}:\d{2}:\d{2}|\d{2}:\d{2}:\d{2}")


def _when(prefix: str, number: int) -> str:
    found = _TIME.search(prefix)
    return found.group() if found else f"line {number}"


def _vllm_lines(name: str, text: str) -> Iterator[Window]:
    for number, (prefix, said) in enumerate(_VLLM_LINE.findall(text), start=1):
        accepted, drafted = (
            re.search(rf"(?<!\w){key}: (\d+) tokens", said) for key in ("Accepted", "Drafted")
        )
        mean = re.search(r"Mean acceptance length: (\d+(?:\.\d+)?)", said)
        rates = re.search(r"Per-position acceptance rate: ((?:[\d.]+(?:, )?)+)", said)
        if not (accepted and drafted and mean and rates):
            continue
        shares = [float(share) for share in rates.group(1).rstrip(", ").split(", ")]
        rounds = int(drafted.group(1)) / len(shares)
        total = int(accepted.group(1))
        notes: tuple[str, ...] = ()
        if not rounds:
            continue
        # At a fixed length drafted / positions is the number of rounds, and the mean must agree.
        has_one_length = abs(1 + total / rounds - float(mean.group(1))) <= 0.0051
        if not has_one_length:
            if float(mean.group(1)) <= 1 or not total:  # too few accepted to tell the rounds by
                continue
            rounds = total / (float(mean.group(1)) - 1)
            notes = (f"{_UNLIKE}; rounds are told from the rounded mean",)
        yield Window(
            engine="vllm",
            route=name,
            when=_when(prefix, number),
            rounds=rounds,
            accepted=total,
            # Rates have three digits: with under 1,000 rounds this is the very count.
            accepted_at=tuple(min(rounds, float(round(share * rounds))) for share in shares),
            has_one_length=has_one_length,
            notes=notes,
        )


def _sglang_lines(name: str, text: str, log_interval: int) -> Iterator[Window]:
    found = enumerate(_SGLANG_LINE.findall(text), start=1)
    for number, (prefix, running, length) in found:
        rounds = float(int(running) * log_interval)
        if rounds and float(length) >= 1:  # less is said where nothing was verified
            yield Window(
                engine="sglang",
                route=name,
                when=_when(prefix, number),
                rounds=rounds,
                accepted=(float(length) - 1) * rounds,
                notes=(f"calls taken as {log_interval} steps of the requests that ran",),
            )


# Answers

_HISTOGRAMS = ("spec_correct_drafts_histogram", "spec_accept_histogram")


def _sglang_answers(name: str, text: str) -> Iterator[Window]:
    """One window per route: rows are requests, `route` or `model` beside their meta_info."""
    routes: dict[str, list[list[int]]] = {}
    for row in _rows(text):
        meta = row.get("meta_info", row)
        if not isinstance(meta, dict):
            continue
        histogram = next((meta[key] for key in _HISTOGRAMS if meta.get(key)), None)
        if histogram is None:
            continue
        is_list = isinstance(histogram, list)
        if not is_list or not all(type(one) is int and one >= 0 for one in histogram):
            raise ValueError(
                f"{name} has the histogram {histogram!r}; give counts of rounds by accepted "
                "drafts, as SGLang's meta_info has them"
            )
        route = str(row.get("route") or row.get("model") or name)
        routes.setdefault(route, []).append(histogram)
    for route, histograms in routes.items():
        depth = max(map(len, histograms)) - 1
        at = [sum(sum(one[i:]) for one in histograms) for i in range(depth + 1)]
        yield Window(
            engine="sglang",
            route=route,
            when=name,
            rounds=at[0],
            accepted=sum(at[1:]),
            accepted_at=tuple(map(float, at[1:])),
            requests=len(histograms),
        )


def _rows(text: str) -> Iterator[dict[str, Any]]:
    """JSON objects of a text's lines, those of a batch's list among them."""
    for line in text.splitlines():
        if not line.startswith(("{", "[{")):
            continue
        try:
            found = json.loads(line)
        except json.JSONDecodeError:
            continue
        yield from found if isinstance(found, list) else [found]
