"""Least squares over rows that come in parts, and where in a residual stream there is room.

Letters: N rows, X regressors, Y regressands, D channels of the stream, C channels of a code,
W draft vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

FLAT = 1e-9
"""A regressor whose variance is less than this share of the mean one counts as constant."""
FLOOR = 1e-5
"""Share of the mean energy that every direction of a stream has at least."""


class NormalEquations:
    """Sums of products from which the coefficients follow, whatever the order of the rows."""

    def __init__(self) -> None:
        self.num_rows = 0
        self._xx: Tensor | None = None
        self._xy: Tensor | None = None
        self._x: Tensor | None = None

    def add(self, given_NX: Tensor, wanted_NY: Tensor) -> None:
        """Take in some rows."""
        sums = (given_NX.T @ given_NX, given_NX.T @ wanted_NY, given_NX.sum(0))
        xx, xy, x = (part.double() for part in sums)
        self._xx = xx if self._xx is None else self._xx + xx
        self._xy = xy if self._xy is None else self._xy + xy
        self._x = x if self._x is None else self._x + x
        self.num_rows += len(given_NX)

    def solve(self, ridge: float | Tensor) -> Tensor:
        """Coefficients [X, Y], without an intercept.

        The ridge counts in units of each regressor's own variance, not of its square: a channel
        that is large and nearly constant can serve as the intercept. Raises ValueError before any
        row came.
        """
        if self._xx is None or self._xy is None or self._x is None or self.num_rows == 0:
            raise ValueError("no rows were added; least squares needs at least 1")
        variance_X = self._xx.diagonal() / self.num_rows - (self._x / self.num_rows) ** 2
        least = max(FLAT * float(variance_X.mean()), torch.finfo(torch.float64).tiny)
        spread_X = (variance_X.clamp(min=least) * self.num_rows).sqrt()
        gram_XX = self._xx / spread_X[:, None] / spread_X
        gram_XX.diagonal().add_(torch.as_tensor(ridge, dtype=gram_XX.dtype, device=gram_XX.device))
        solved_XY = torch.linalg.solve(gram_XX, self._xy / spread_X[:, None])
        return (solved_XY / spread_X[:, None]).float()

    def predicted_energy(self, solution_XY: Tensor) -> Tensor:
        """Second moment [Y, Y] of what the coefficients predict on the rows."""
        assert self._xx is not None
        wide_XY = solution_XY.double()
        return wide_XY.T @ self._xx @ wide_XY / self.num_rows


class Room(NamedTuple):
    """Directions set aside in a stream for a code beside the content that the output head reads."""

    keep_DD: Tensor
    """Projects content onto what it keeps; row vectors are multiplied by its transpose."""
    read_CD: Tensor
    """Reads the code; sees nothing of the content kept."""
    write_DC: Tensor
    """Writes the code where the output head hears it least; read after write is the identity."""
    lost: float
    """Share of the content's energy at the output head that is given up."""
    noise: float
    """Energy of a white code of unit size at the output head, as a share of the content's."""


def make_room(energy_DD: Tensor, output_WD: Tensor, count: int) -> Room:
    """Give up the `count` directions in which content of this second moment moves logits least.

    A shift of all logits alike moves no probability, so the rows of the output head are taken
    without their mean.
    """
    width = energy_DD.shape[0]
    rows_WD = output_WD.double() - output_WD.double().mean(0)
    heard_DD = rows_WD.T @ rows_WD / len(rows_WD)
    eye_DD = torch.eye(width, dtype=torch.float64, device=energy_DD.device)
    energy_DD = energy_DD.double() + FLOOR * energy_DD.diagonal().mean() * eye_DD
    heard_DD = heard_DD + FLOOR * heard_DD.diagonal().mean() * eye_DD
    values_D, vectors_DD = torch.linalg.eigh(energy_DD)
    root_DD = vectors_DD * values_D.sqrt() @ vectors_DD.T
    inverse_DD = vectors_DD * values_D.rsqrt() @ vectors_DD.T
    loud_D, whitened_DD = torch.linalg.eigh(root_DD @ heard_DD @ root_DD)
    given_DC = whitened_DD[:, :count]
    keep_DD = root_DD @ (eye_DD - given_DC @ given_DC.T) @ inverse_DD
    read_CD = given_DC.T @ inverse_DD
    quiet_DC = torch.linalg.solve(heard_DD, read_CD.T)
    write_DC = quiet_DC @ torch.linalg.inv(read_CD @ quiet_DC)
    size_C = write_DC.norm(dim=0)
    write_DC, read_CD = write_DC / size_C, read_CD * size_C[:, None]
    noise = float((write_DC.T @ heard_DD @ write_DC).trace() / loud_D.sum())
    lost = float(loud_D[:count].sum() / loud_D.sum())
    return Room(keep_DD.float(), read_CD.float(), write_DC.float(), lost, noise)
