"""`outrider target`: fetch a target and print the folder its files lie in."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from outrider.data.anatomy import find_folder


@dataclass(frozen=True, kw_only=True)
class TargetSettings:
    """Which target to fetch."""

    name: Annotated[str, tyro.conf.Positional] = "smollm2-demo"
    """`smollm2-demo`, a Hub id, or a local folder."""


def main(argv: Sequence[str] | None = None) -> None:
    """Print the folder of a target, fetched first where it has to be."""
    settings = tyro.cli(TargetSettings, args=argv, prog="outrider target")
    print(find_folder(settings.name))
