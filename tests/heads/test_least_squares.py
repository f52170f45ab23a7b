"""Least squares from sums, and the room for a code beside content."""

import pytest
import torch

from outrider.heads.least_squares import NormalEquations, make_room


def sample(rows: int = 500) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    given = torch.randn(rows, 6, generator=made) * torch.tensor([1, 9, 1, 1, 0.1, 1])
    given[:, 0] += 40.0  # large and nearly constant: it must serve as the intercept
    wanted = given @ torch.randn(6, 2, generator=made) + torch.randn(rows, 2, generator=made)
    return given, wanted + 3


def test_the_solution_is_least_squares_whatever_the_parts():
    given, wanted = sample()
    exact = torch.linalg.lstsq(given.double(), wanted.double()).solution
    for parts in (1, 7):
        equations = NormalEquations()
        for rows in torch.arange(500).chunk(parts):
            equations.add(given[rows], wanted[rows])
        torch.testing.assert_close(equations.solve(1e-9).double(), exact, rtol=1e-3, atol=1e-3)
        energy = (given.double() @ exact).T @ (given.double() @ exact) / 500
        torch.testing.assert_close(equations.predicted_energy(exact), energy, rtol=1e-3, atol=1e-3)


def test_the_ridge_counts_in_each_regressor_s_own_variance():
    """Against the closed form of ridge regression with that penalty, and in other units."""
    given, wanted = sample()
    ridge = torch.tensor([0.0, 0.5, 0.1, 0.0, 2.0, 0.3])
    equations = NormalEquations()
    equations.add(given, wanted)
    found = equations.solve(ridge).double()
    x, y = given.double(), wanted.double()
    penalty = torch.diag(ridge.double() * x.var(0, correction=0) * len(x))
    exact = torch.linalg.solve(x.T @ x + penalty, x.T @ y)
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-4)
    units = torch.tensor([1.0, 1e-3, 50.0, 7.0, 1.0, 2.0])
    scaled = NormalEquations()
    scaled.add(given * units, wanted)
    torch.testing.assert_close(
        scaled.solve(ridge).double() * units[:, None], exact, rtol=1e-3, atol=1e-3
    )


def test_no_rows_are_refused():
    with pytest.raises(ValueError, match="at least 1"):
        NormalEquations().solve(0.1)


def test_a_code_and_the_content_kept_do_not_meet():
    made = torch.Generator().manual_seed(1)
    mix = torch.randn(40, 40, generator=made) * torch.logspace(1, -2, 40)
    energy, output = mix @ mix.T, torch.randn(300, 40, generator=made)
    room = make_room(energy, output, 9)
    code = room.read_CD @ room.write_DC
    torch.testing.assert_close(code, torch.eye(9), rtol=1e-3, atol=1e-3)
    assert float((room.read_CD @ room.keep_DD).abs().max()) < 1e-3
    torch.testing.assert_close(room.keep_DD @ room.keep_DD, room.keep_DD, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(room.write_DC.norm(dim=0), torch.ones(9))


def test_no_other_room_costs_less():
    """What is given up, by brute force over samples of content, against many other rooms."""
    made = torch.Generator().manual_seed(2)
    content = torch.randn(4000, 12, generator=made) @ torch.randn(12, 12, generator=made)
    output = torch.randn(200, 12, generator=made) * torch.logspace(0.5, -1, 12)
    output = output - output.mean(0)
    energy = content.T @ content / len(content)
    room = make_room(energy, output, 4)
    heard = (content @ output.T).pow(2).sum()

    def lost(keep: torch.Tensor) -> float:
        return float(((content - content @ keep.T) @ output.T).pow(2).sum() / heard)

    assert lost(room.keep_DD) == pytest.approx(room.lost, rel=1e-2)
    for _ in range(50):
        basis = torch.linalg.qr(torch.randn(12, 4, generator=made)).Q
        # The best that can be kept when these directions of the white content are given up.
        values, vectors = torch.linalg.eigh(energy)
        root, inverse = vectors * values.sqrt() @ vectors.T, vectors * values.rsqrt() @ vectors.T
        assert lost(root @ (torch.eye(12) - basis @ basis.T) @ inverse) >= room.lost
