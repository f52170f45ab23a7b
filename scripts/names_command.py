"""`outrider names`: what every tool would call and count of the same rounds, on a worked case."""

from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from outrider.eval.metrics import Round
from outrider.eval.names import C16, Run, names_table, reconcile

_FORM = "drafted/accepted/emitted of each round, then stop or length: 4/4/5,4/0/1,4/4/3,stop"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Whose rounds to name; `outrider decode --names` does it for a run of its own."""

    request: tuple[str, ...] = ()
    """One per prompt: drafted/accepted/emitted of each round, then stop or length, all with commas.
    A worked case (two prompts, one cut by an end token, one by its limit) when left out."""


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    settings = tyro.cli(
        Settings, args=argv, prog="outrider names", config=(tyro.conf.FlagCreatePairsOff,)
    )
    requests = [read_request(text) for text in settings.request]
    if not requests:
        requests = list(C16)
        print("Two prompts, 4 drafts a round, written drafted/accepted/emitted:")
        for one in requests:
            rounds = [f"{each.drafted}/{each.accepted}/{each.emitted}" for each in one.rounds]
            print(f"  {' '.join(rounds)}, ended by {one.finish}")
        print("A cut round emits no more than it accepted: that is where the tools part.\n")
    print(names_table(reconcile(requests)))


def read_request(text: str) -> Run:
    """Rounds as they are written on the command line. ValueError for anything else."""
    *rounds, finish = text.split(",")
    try:
        triples = [tuple(map(int, one.split("/"))) for one in rounds]
        found = [Round(drafted, accepted, emitted) for drafted, accepted, emitted in triples]
    except (TypeError, ValueError) as error:
        raise ValueError(f"request is {text!r}; write {_FORM}") from error
    if finish not in ("stop", "length"):
        raise ValueError(f"request is {text!r} and ends with {finish!r}; write {_FORM}")
    return Run(found, finish)
