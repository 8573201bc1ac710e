"""The time of an optimizer step, against peers and against the matrix products that a step needs at least.

    python -m benchmarks.optimizer_step [--quick] [--mode within] [--scale 0.003] [--compile] [--output results.json]

The work is the attention of the paper's ViT: 7 fused weights (1152, 384) with 768 constrained rows, `within` heads (24
blocks of 32 rows) and `across` them (2 of 384).  Single thread, float32, all contestants take turns in one run.  It prints
medians of processor time, which other work on the machine disturbs least, and ratios of medians.  A peer that
is not installed is named and skipped.

Gradients are Gaussian with standard deviation `--scale`.  It decides how far a step goes, and so how many terms the
retraction needs; by default η‖Z‖ and η‖U‖ are about 0.03 within heads, several times what the paper's ViT has.
"""

import argparse
import importlib
import json
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # before torch is imported: no chatter from its profiler

import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ortho_vit import StiefelParameter, orthogonality_error
from ortho_vit.optim import StiefelAdam, StiefelSGD
from ortho_vit.stiefel import random_stiefel
from tests.helpers.dispatch import NoHostReads, capturable_on_cpu

LAYERS, D = 7, 384
BLOCKS = {"within": 24, "across": 2}


@dataclass
class Contestant:
    """Something with parameters, gradients and a step to be timed."""

    name: str
    parameters: Sequence[Tensor]
    step: Callable[[], object]
    frames: Callable[[], Sequence[Tensor]]  # the orthonormal matrices
    other_gradients: Sequence[Tensor] = ()  # of what is not a parameter
    slow: bool = False  # seconds per step: few of them are timed

    def set_gradients(self, scale: float) -> None:
        for p in self.parameters:
            p.grad = torch.randn_like(p).mul_(scale)
        for gradient in self.other_gradients:
            gradient.normal_(0, scale)

    def error(self) -> float:
        return max((orthogonality_error(x) for x in self.frames()), default=float("nan"))


def fused(blocks: int) -> list[StiefelParameter]:
    def weight() -> Tensor:
        return torch.cat([random_stiefel(blocks, 2 * D // blocks, D).flatten(0, 1), 0.02 * torch.randn(D, D)])

    return [StiefelParameter(weight(), blocks=blocks, rows=2 * D) for _ in range(LAYERS)]


def ours(name: str, make: Callable, blocks: int) -> Contestant:
    parameters = fused(blocks)
    return Contestant(name, parameters, make(parameters).step, lambda: parameters)


def torch_floor(name: str, make: Callable, blocks: int) -> Contestant:
    parameters = [nn.Parameter(p.detach().clone()) for p in fused(blocks)]
    return Contestant(name, parameters, make(parameters).step, list)


def separate(blocks: int) -> tuple[list[Tensor], list[Tensor]]:
    """W^Q and W^K of each layer as a batch of tall frames, as peers want them; and the free W^V."""
    frames = [random_stiefel(blocks // 2, D, 2 * D // blocks) for _ in range(2 * LAYERS)]
    return frames, [0.02 * torch.randn(D, D) for _ in range(LAYERS)]


def transcription(blocks: int) -> Contestant:
    """Algorithm 1 as its authors run it: a loop over weights (heads, d_k, d_model), which are transposed for the step; ten
    coupled iterations from the Frobenius norm, each with the residual of its stopping rule."""
    frames, free = separate(blocks)
    weights = [nn.Parameter(x.mT.contiguous()) for x in frames]
    V = [nn.Parameter(v) for v in free]
    Z = [torch.zeros(x.shape[0], x.shape[2], x.shape[2]) for x in frames]
    U = [torch.zeros_like(x) for x in frames]
    sgd = torch.optim.SGD(V, lr=0.1, momentum=0.9)

    def root(A: Tensor, steps: int = 10) -> Tensor:
        I = torch.eye(A.shape[-1]).expand_as(A)
        norm = torch.linalg.matrix_norm(A, keepdim=True)
        Y, P = A / norm, I
        for _ in range(steps):
            F = 0.5 * (3 * I - P @ Y)
            Y, P = Y @ F, F @ P
            torch.linalg.matrix_norm(Y @ Y - A / norm)
        return P / norm.sqrt()

    @torch.no_grad()
    def step(lr: float = 0.1, mu: float = 0.9) -> None:
        sgd.step()
        for i, weight in enumerate(weights):
            assert weight.grad is not None
            x, G = weight.mT, weight.grad.mT
            f, g = x.mT @ G - G.mT @ x, G - x @ (x.mT @ G)
            U_half = mu * U[i] + 0.25 * lr * U[i] @ Z[i] - g
            Z[i] = mu * Z[i] - f
            X_half = x + lr * x @ Z[i]
            X_dagger = X_half + lr * U_half @ (X_half.mT @ X_half)
            U[i] = U_half - lr * X_half @ (U_half.mT @ U_half)
            x.copy_(X_dagger @ root(X_dagger.mT @ X_dagger))

    return Contestant(
        "transcription of Algorithm 1", [*weights, *V], step, lambda: [w.detach() for w in weights]
    )


def geoopt_peer(name: str, kind: str, blocks: int, **options) -> Contestant:
    geoopt = importlib.import_module("geoopt")
    frames, free = separate(blocks)
    manifold = geoopt.EuclideanStiefel()
    X = [geoopt.ManifoldParameter(x, manifold=manifold) for x in frames]
    parameters = [*X, *(nn.Parameter(v) for v in free)]
    return Contestant(name, parameters, getattr(geoopt.optim, kind)(parameters, **options).step, lambda: X)


def pogo_peer(name: str, kind: str, lr: float, blocks: int, **options) -> Contestant:
    """POGO keeps rows orthonormal; it takes constrained parameters only, so the free W^V have torch's optimizer."""
    pogo, base = importlib.import_module("pogo"), importlib.import_module("pogo.base")
    frames, free = separate(blocks)
    X, V = [nn.Parameter(x.mT.contiguous()) for x in frames], [nn.Parameter(v) for v in free]
    ours = pogo.POGO(X, getattr(base, kind)(**options), lr)
    theirs = torch.optim.SGD(V, lr=lr, momentum=0.9) if kind == "SGD" else torch.optim.Adam(V, lr=lr)

    def step() -> None:
        ours.step()
        theirs.step()

    return Contestant(name, [*X, *V], step, lambda: [x.detach() for x in X])


def parametrized(blocks: int) -> Contestant:
    """torch's own `orthogonal` parametrization: forward and backward of the map are part of every step."""
    frames, free = separate(blocks)
    layers = []
    for x in frames:
        layer = nn.Module()
        layer.weight = nn.Parameter(x.clone())
        layers.append(nn.utils.parametrizations.orthogonal(layer))
    inner = [p for layer in layers for p in layer.parameters()]
    V = [nn.Parameter(v) for v in free]
    optimizer = torch.optim.SGD([*inner, *V], lr=0.1, momentum=0.9)
    gradients = [torch.randn_like(x) for x in frames]

    def step() -> None:
        for p in inner:
            p.grad = None
        weights = [layer.weight for layer in layers]
        torch.autograd.backward(weights, gradients)
        optimizer.step()

    name, frames_now = "parametrizations.orthogonal", lambda: [layer.weight.detach() for layer in layers]
    return Contestant(name, V, step, frames_now, gradients, slow=True)


def contestants(mode: str) -> list[Contestant]:
    blocks = BLOCKS[mode]
    stiefel: dict[str, Callable] = {
        "StiefelSGD": partial(StiefelSGD, lr=0.1),
        "StiefelAdam": partial(StiefelAdam, lr=1e-3),
        "StiefelSGD, integrator paper": partial(StiefelSGD, lr=0.1, integrator="paper"),
        "StiefelSGD, foreach": partial(StiefelSGD, lr=0.1, foreach=True),
        "StiefelAdam, foreach": partial(StiefelAdam, lr=1e-3, foreach=True),
        "StiefelSGD, capturable": partial(StiefelSGD, lr=0.1, foreach=True, capturable=True),
        "StiefelAdam, capturable": partial(StiefelAdam, lr=1e-3, foreach=True, capturable=True),
    }
    made = [
        *(ours(name, make, blocks) for name, make in stiefel.items()),
        transcription(blocks),
        torch_floor("torch SGD (no constraint)", partial(torch.optim.SGD, lr=0.1, momentum=0.9), blocks),
        torch_floor("torch AdamW (no constraint)", partial(torch.optim.AdamW, lr=1e-3), blocks),
        parametrized(blocks),
    ]
    try:
        made.append(geoopt_peer("geoopt RiemannianSGD", "RiemannianSGD", blocks, lr=0.1, momentum=0.9))
        made.append(geoopt_peer("geoopt RiemannianAdam", "RiemannianAdam", blocks, lr=1e-3))
    except ImportError:
        print("geoopt is not installed: skipped")
    try:
        made.append(pogo_peer("POGO, SGD", "SGD", 0.1, blocks, momentum=0.9))
        made.append(pogo_peer("POGO, VectorAdam", "VectorAdam", 1e-3, blocks))
    except ImportError:
        print("pogo-torch is not installed: skipped")
    return made


HOST_READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")


class OpCounter(TorchDispatchMode):
    count = reads = 0  # operators, and looks at a value from the host

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        self.reads += func.overloadpacket.__name__ in HOST_READS
        return func(*args, **(kwargs or {}))


def product_flops(_, A: torch.Size, B: torch.Size, **options) -> int:
    """Of A B, from the shapes."""
    return 2 * A.numel() * B[-1]


def ops_and_flops(contestant: Contestant, scale: float) -> tuple[int, int, int]:
    contestant.set_gradients(scale)
    with OpCounter() as counter:
        contestant.step()
    contestant.set_gradients(scale)
    in_place = {torch.ops.aten.baddbmm_: product_flops}  # which torch does not count
    with FlopCounterMode(display=False, custom_mapping=in_place) as flops:
        contestant.step()
    return counter.count, counter.reads, flops.get_total_flops()


def compiled_kernels(make: Callable) -> tuple[int, int, int]:
    """Kernels of a capturable step: eager, and what inductor makes of them, fused ones and products."""
    parameters = fused(BLOCKS["within"])
    optimizer = make(parameters, lr=torch.tensor(1e-3), foreach=True, capturable=True)

    def draw() -> None:
        for p in parameters:
            p.grad = torch.randn_like(p).mul_(0.003)

    for _ in range(2):  # which make the state and lay it out
        draw()
        optimizer.step()
    draw()
    with NoHostReads() as watched:
        optimizer.step()
    draw()
    _, code = run_and_get_code(torch.compile(optimizer.step, fullgraph=True))
    calls = "\n".join(text[text.index("def call") :] for text in code)
    generated = re.findall(r"^ *(?:cpp|triton)_\w+[.(]", calls, re.MULTILINE)
    return len(watched.kernels), len(generated), calls.count("extern_kernels.")


def peak_extra_memory(contestant: Contestant, scale: float) -> float:
    """Peak bytes allocated inside a step beyond what stood before, in units of the constrained weights."""
    contestant.set_gradients(scale)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        contestant.step()
    live = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak / (LAYERS * 2 * D * D * 4)


def needed_products(mode: str, adam: bool) -> tuple[float, float]:
    """What a step needs at least, in products of m²n and m³ for each block (half for a symmetric or skew result).

    Non-square: X Hᵀ and the projection, X½, a Gram matrix (half), X⁺ and U⁺ (Adam: three besides, for g and the
    projections of its momentum, and no U⁺); for the factors W Wᵀ, D² and the one that makes E (half each).
    Square: X Gᵀ, Y and X⁺; the Gram matrix and its square (half each).
    """
    if mode == "across":
        return 3.0, 1.0
    return (7.5 if adam else 5.5), 1.5


def measure(mode: str, rounds: int, steps: int, scale: float) -> list[dict]:
    field = contestants(mode)
    for contestant in field:  # past the allocation of state, and past the first refresh
        for _ in range(2):
            contestant.set_gradients(scale)
            contestant.step()
    times: dict[str, list[float]] = {c.name: [] for c in field}
    for i in range(rounds):
        for contestant in field:
            if contestant.slow and i >= 3:
                continue
            contestant.set_gradients(scale)
            start = time.process_time()
            contestant.step()
            times[contestant.name].append(time.process_time() - start)
    rows = []
    for c in field:
        ops, reads, flops = ops_and_flops(c, scale)
        memory = peak_extra_memory(c, scale)
        ms = 1e3 * statistics.median(times[c.name])
        if not c.slow:
            for _ in range(steps - rounds):
                c.set_gradients(scale)
                c.step()
        row = {"name": c.name, "ms": ms, "error": c.error(), "ops": ops, "reads": reads, "gflop": flops / 1e9}
        rows.append(row | {"memory": memory})
    return rows


def report(mode: str, rows: list[dict], steps: int) -> None:
    by_name = {row["name"]: row for row in rows}
    reference = by_name["StiefelSGD"]["ms"]
    print(f"\n{mode} heads: {LAYERS} weights (1152, 384), 768 rows constrained, {BLOCKS[mode]} blocks each")
    print(
        f"{'':34}{'ms':>8}{'ratio':>8}{f'error @{steps}':>12}{'ATen ops':>10}{'reads':>7}{'GFLOP':>8}{'memory':>8}"
    )
    for row in sorted(rows, key=lambda r: r["ms"]):
        print(
            f"{row['name']:34}{row['ms']:8.1f}{row['ms'] / reference:8.2f}{row['error']:12.1e}"
            f"{row['ops']:10d}{row['reads']:7d}{row['gflop']:8.2f}{row['memory']:7.1f}x"
        )
    m = 2 * D // BLOCKS[mode]
    for name, adam in (("StiefelSGD", False), ("StiefelAdam", True)):
        large, small = needed_products(mode, adam)
        needed = LAYERS * BLOCKS[mode] * 2 * m**2 * (large * D + small * m) / 1e9
        used = by_name[name]["gflop"]
        rate = used / by_name[name]["ms"] * 1e3
        print(
            f"{name}: needs at least {needed:.2f} GFLOP, used {used:.2f} ({needed / used:.0%}), at {rate:.0f} GFLOP/s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each contestant")
    parser.add_argument("--quick", action="store_true", help="five timed steps, and the error after 30")
    parser.add_argument("--mode", choices=list(BLOCKS), help="only within, or only across heads")
    parser.add_argument("--scale", type=float, default=0.003, help="standard deviation of the gradients")
    parser.add_argument(
        "--compile", action="store_true", help="count the kernels of a compiled step, and nothing else"
    )
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {platform.processor() or platform.machine()}, 1 thread, float32")
    if options.compile:
        for kind in (StiefelSGD, StiefelAdam):
            eager, generated, products = compiled_kernels(kind)
            compiled = f"compiled {generated + products}, of which {products} are products"
            print(f"{kind.__name__}, capturable: {eager} kernels per step; {compiled}")
        return
    results = {}
    for mode in [options.mode] if options.mode else BLOCKS:
        rounds, steps = (5, 30) if options.quick else (options.rounds, 200)
        results[mode] = measure(mode, rounds, steps, options.scale)
        report(mode, results[mode], steps)
    if options.output:
        options.output.write_text(
            json.dumps({"torch": torch.__version__, "scale": options.scale, **results}, indent=1)
        )


if __name__ == "__main__":
    with capturable_on_cpu():
        main()
