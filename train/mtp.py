"""Entry point: train an MTP module.

accelerate launch train/mtp.py --recipe train/configs/mtp-demo.yaml [--flags]
"""

from collections.abc import Sequence

from outrider.train.kinds import MtpRun
from outrider.train.launch import launch


def main(argv: Sequence[str] | None = None) -> None:
    """Train an MTP module; wrong input exits with 2, an interrupted run with 130."""
    launch(MtpRun, argv)


if __name__ == "__main__":
    main()
