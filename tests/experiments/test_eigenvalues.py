"""The eigenvalue experiments: optima from `eigh`, and every figure end to end in its quick form."""

import json
import math
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from ortho_vit.experiments import eigenvalues
from ortho_vit.experiments.eigenvalues import METHODS, PolarProjectedSGD, Problem, maximize
from ortho_vit.optim import StiefelSGD
from ortho_vit.parameter import StiefelParameter
from ortho_vit.stiefel import orthogonality_error

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("brockett", [False, True])
def test_the_optimum_is_attained_at_the_eigenvectors(brockett: bool) -> None:
    problem = Problem.random(20, 3, seed=0, brockett=brockett)
    X = torch.linalg.eigh(problem.A).eigenvectors.flip(1)[:, :3]
    error, gradient = problem.evaluate(X)
    assert error < 1e-13
    torch.testing.assert_close(X @ (X.mT @ gradient), gradient, atol=1e-12, rtol=0)


def test_the_gradient_is_that_of_the_cost() -> None:
    problem = Problem.random(12, 3, seed=0, brockett=True)
    X = problem.start.clone().requires_grad_()
    torch.trace(X.mT @ problem.A @ X @ torch.diag(problem.N)).backward()
    torch.testing.assert_close(problem.evaluate(X.detach())[1], X.grad)


@pytest.mark.parametrize("method", [name for name in METHODS if "Adam" not in name])
def test_every_method_reaches_the_eigenvalues(method: str) -> None:
    problem = Problem.random(30, 2, seed=1)
    run = maximize(problem, METHODS[method], 3000, stop_below=1e-10, deviations=False)
    assert run.errors[-1] < 1e-10


@pytest.mark.parametrize("integrator", ["isometric", "paper"])
def test_adam_reaches_the_eigenvalues_as_its_rate_decays(integrator: str) -> None:
    """Adam at a constant rate circles the optimum at a distance of its rate; smaller rates come closer."""
    problem = Problem.random(30, 2, seed=1)
    factory = partial(METHODS["StiefelAdam"], integrator=integrator, lr=1e-2)
    assert maximize(problem, factory, 3000, stop_below=1e-10, deviations=False).first_below(1e-6) is not None


def test_metric_cannot_matter_for_eigenvalues_and_does_for_brockett() -> None:
    for brockett in (False, True):
        problem = Problem.random(30, 4, seed=0, brockett=brockett)
        runs = [
            maximize(problem, partial(StiefelSGD, lr=0.1, momentum=0.9, metric=metric), 30)
            for metric in ("canonical", "euclidean")
        ]
        gap = max(abs(p - q) for p, q in zip(runs[0].errors, runs[1].errors, strict=True))
        assert gap > 1e-3 if brockett else gap < 1e-12


def test_overflow_is_recorded_not_raised() -> None:
    problem = Problem.random(60, 5, seed=0)
    factory = partial(StiefelSGD, lr=5.0, momentum=0.9, integrator="paper")
    run = maximize(problem, factory, 200, deviations=False)
    assert run.overflowed
    assert len(run.errors) < 200
    assert not maximize(problem, partial(StiefelSGD, lr=5.0, momentum=0.9), 200, deviations=False).overflowed


def test_the_polar_variant_keeps_the_manifold_and_not_the_tangent_space() -> None:
    parameter = StiefelParameter(Problem.random(20, 3, seed=0).start)
    optimizer = PolarProjectedSGD([parameter], lr=0.1, momentum=0.9)
    for _ in range(3):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    X, M = parameter.matrices()[0], optimizer.state[parameter]["momentum_buffer"][0]
    assert orthogonality_error(parameter) < 1e-14
    assert (X.mT @ M + M.mT @ X).abs().max() > 0.1


@pytest.mark.parametrize("figure", eigenvalues.FIGURES)
def test_every_figure_runs_and_is_saved(figure: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    eigenvalues.main([figure, "--quick", "--output", str(tmp_path)])
    (saved,) = tmp_path.glob("*.json")
    rows = json.loads(saved.read_text(encoding="utf-8"))["table"]
    assert rows
    assert saved.with_suffix(".csv").stat().st_size > 100
    assert saved.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    assert len(capsys.readouterr().out.splitlines()) == len(rows) + 1


def test_a_seed_repeats_a_run_and_another_does_not() -> None:
    first, again, other = (eigenvalues.retraction(seed=seed, quick=True).series for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_an_unknown_figure_is_named(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stop:
        eigenvalues.main(["fig-none"])
    assert stop.value.code == 2
    assert "invalid choice: 'fig-none'" in capsys.readouterr().err


def test_an_output_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    command = [sys.executable, "-m", "ortho_vit.experiments.eigenvalues", "fig-retraction", "--quick"]
    command += ["--output", str(tmp_path / "file")]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 1
    assert re.search(r"^error: .*file", result.stderr)
    assert len(result.stderr.splitlines()) == 1  # before anything was run


def test_an_impossible_size_is_named() -> None:
    with pytest.raises(ValueError, match="m must be between 1 and n = 3, got 4"):
        Problem.random(3, 4, seed=0)


def test_the_brockett_start_is_the_same_and_finite() -> None:
    error, _ = Problem.random(10, 2, seed=0, brockett=True).evaluate(Problem.random(10, 2, seed=0).start)
    assert math.isfinite(error)
