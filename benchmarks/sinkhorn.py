"""`ortho_vit.transport.sinkhorn` against POT's, on 500 × 500 points at one tolerance.

    python -m benchmarks.sinkhorn [--size 500] [--rounds 5] [--tolerance 1e-9]

Every solver runs in turn, round after round, and the medians are compared: on a shared machine the ratios
hold, the times do not.  POT stops on the ℓ² error of one marginal, ours on the ℓ¹ error, which is never
smaller; both errors reached are printed.
"""

import argparse
import platform
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from ortho_vit.transport import sinkhorn

try:
    import ot
except ImportError:
    ot = None

Solver = Callable[[Tensor, Tensor, float, float], Tensor]


def ours(a: Tensor, C: Tensor, reg: float, tolerance: float) -> Tensor:
    return sinkhorn(a, a, C, reg, tolerance=tolerance, max_sweeps=100_000).plan


def pot(method: str, backend: str) -> Solver:
    def solve(a: Tensor, C: Tensor, reg: float, tolerance: float) -> Tensor:
        arguments = (a, a, C) if backend == "torch" else (a.numpy(), a.numpy(), C.numpy())
        plan = ot.sinkhorn(*arguments, reg, method=method, stopThr=tolerance, numItermax=100_000)
        return torch.as_tensor(plan)

    return solve


def solvers() -> dict[str, Solver]:
    if ot is None:
        print("POT is not installed (pip install POT): nothing to compare with")
        return {"ours": ours}
    methods = ("sinkhorn_log", "sinkhorn_stabilized", "sinkhorn")
    return {"ours": ours} | {f"POT {m} ({b})": pot(m, b) for m in methods for b in ("numpy", "torch")}


def problem(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.rand(n, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    C = torch.cdist(x, y).square()
    return torch.full((n,), 1 / n, dtype=torch.float64), C / C.max()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tolerance", type=float, default=1e-9)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # POT's overflow warnings: the error column says what came of them
    a, C = problem(options.size)
    names = solvers()
    version = "none" if ot is None else ot.__version__
    threads, size = torch.get_num_threads(), options.size
    print(f"torch {torch.__version__}, POT {version}, {platform.machine()}, {threads} thread(s)")
    print(f"{size} × {size}, float64, tolerance {options.tolerance:g}, {options.rounds} rounds")
    for reg in (0.05, 0.01, 0.005):
        times: dict[str, list[float]] = {name: [] for name in names}
        errors: dict[str, float] = {}
        for _ in range(options.rounds):
            for name, solve in names.items():
                start = time.perf_counter()
                plan = solve(a, C, reg, options.tolerance)
                times[name].append(time.perf_counter() - start)
                errors[name] = max((plan.sum(i) - a).norm().item() for i in (0, 1))
        base = statistics.median(times["ours"])
        for name in names:
            median = statistics.median(times[name])
            ratio = f"{1e3 * median:9.1f} ms  {median / base:6.1f} × ours"
            print(f"reg {reg:<6g} {name:32s} {ratio}  ℓ² error {errors[name]:.1e}")


if __name__ == "__main__":
    main()
