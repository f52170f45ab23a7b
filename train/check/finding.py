"""What a check found, in one form for the terminal, the page, the JSON and refusals of training."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["ok", "warn", "fail", "skipped"]


@dataclass(frozen=True)
class Finding:
    """One thing that was checked."""

    name: str
    verdict: Verdict
    seen: str
    """What there is, with its figures."""
    remedy: str = ""
    """What to do where it is not ok."""
    fix: Mapping[str, Any] = field(default_factory=dict)
    """Settings that mend it safely, by flag name; `None` leaves a flag out."""

    def to_dict(self) -> dict[str, Any]:
        """As plain values for JSON."""
        return {key: dict(value) if key == "fix" else value for key, value in vars(self).items()}


def ok(name: str, seen: str) -> Finding:
    """Nothing to do."""
    return Finding(name, "ok", seen)


def warn(name: str, seen: str, remedy: str = "", **fix: Any) -> Finding:  # noqa: ANN401
    """Worth knowing; training goes on."""
    return Finding(name, "warn", seen, remedy, fix)


def fail(name: str, seen: str, remedy: str, **fix: Any) -> Finding:  # noqa: ANN401
    """Must be mended first."""
    return Finding(name, "fail", seen, remedy, fix)


def failed(name: str, error: BaseException, **fix: Any) -> Finding:  # noqa: ANN401
    """A refusal as a finding: house messages say `what was seen; the remedy`."""
    seen, _, remedy = str(error).rpartition("; ")
    return fail(name, seen or str(error), remedy if seen else "", **fix)


def noted(name: str, line: str) -> Finding:
    """A remark of training as a finding: `note: what was seen; the remedy`."""
    seen, _, remedy = line.removeprefix("note: ").partition("; ")
    return warn(name, seen, remedy)


def refuse(findings: Iterable[Finding]) -> None:
    """Raise ValueError for the first failure, as training does before its first step."""
    for one in findings:
        if one.verdict == "fail":
            raise ValueError(f"{one.seen}; {one.remedy}")
