"""Entry point: train an EAGLE draft head.

accelerate launch train/eagle.py --recipe train/configs/demo.yaml [--flags]
"""

from collections.abc import Sequence

from outrider.train.kinds import EagleRun
from outrider.train.launch import launch


def main(argv: Sequence[str] | None = None) -> None:
    """Train an EAGLE head; wrong input exits with 2, an interrupted run with 130."""
    launch(EagleRun, argv)


if __name__ == "__main__":
    main()
