"""Entry point: train Hydra heads.

accelerate launch train/hydra.py --recipe train/configs/hydra-demo.yaml [--flags]
"""

from collections.abc import Sequence

from outrider.train.kinds import HydraRun
from outrider.train.launch import launch


def main(argv: Sequence[str] | None = None) -> None:
    """Train Hydra heads; wrong input exits with 2, an interrupted run with 130."""
    launch(HydraRun, argv)


if __name__ == "__main__":
    main()
