"""Entry point: train Medusa heads.

accelerate launch train/medusa.py --recipe train/configs/medusa-demo.yaml [--flags]
"""

from collections.abc import Sequence

from outrider.train.kinds import MedusaRun
from outrider.train.launch import launch


def main(argv: Sequence[str] | None = None) -> None:
    """Train Medusa heads; wrong input exits with 2, an interrupted run with 130."""
    launch(MedusaRun, argv)


if __name__ == "__main__":
    main()
