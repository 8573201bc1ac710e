"""When does `shard_stiefel=True` pay?  A model on paper: FLOPs, bytes and launches of one StiefelSGD step.

    python -m benchmarks.sharding_model [--rate 6] [--memory 1500] [--network 100] [--latency 10]

Prints the table of docs/sharding.md: the constrained part of a step, whole on every rank and shared among them.
"""

import argparse
import math
from dataclasses import dataclass

VITS = {"ViT-B": (12, 768, 12), "ViT-L": (24, 1024, 16), "ViT-H": (32, 1280, 16)}  # layers, width, heads
RANKS = (8, 32, 128, 512, 1024)
LAUNCHES = {"within": 106, "across": 68}  # kernels of a capturable step
PASSES = 14  # over an m × n matrix: the gradient in, X in and out, U twice, and the operands of the products


@dataclass
class Machine:
    """The speed of a GPU and of its network."""

    rate: float = 6.0  # TFLOP/s on batches of small float32 products
    memory: float = 1500.0  # GB/s
    network: float = 100.0  # GB/s that an all-gather delivers to a rank
    latency: float = 10.0  # μs per doubling of the ranks
    launch: float = 5.0  # μs per operator


@dataclass
class Work:
    """The constrained blocks of a model: how many, of which shape."""

    mode: str
    blocks: int
    m: int
    n: int

    @property
    def flops(self) -> float:
        """Of one block: 5 products of m²n and 4.5 of m³; square, 2 of m³ and three halves."""
        m, n = self.m, self.n
        return 2 * (3.5 * m**3 if m == n else 5 * m**2 * n + 4.5 * m**3)

    @property
    def bytes(self) -> float:
        return 4 * self.m * self.n


def work(name: str, mode: str) -> Work:
    layers, width, heads = VITS[name]
    heads = heads if mode == "within" else 1
    return Work(mode, 2 * layers * heads, width // heads, width)


def whole(work: Work, on: Machine, blocks: int | None = None) -> float:
    """The milliseconds of a step of this many blocks (None: all)."""
    blocks = work.blocks if blocks is None else blocks
    compute = max(work.flops / (on.rate * 1e12), PASSES * work.bytes / (on.memory * 1e9))
    return 1e3 * blocks * compute + 1e-3 * LAUNCHES[work.mode] * on.launch


def shared(work: Work, ranks: int, on: Machine) -> float:
    """The milliseconds of a step whose blocks are shared: the largest share, and an all-gather of rows of that size."""
    share = math.ceil(work.blocks / ranks)
    gathered = share * work.bytes * (ranks - 1)
    return whole(work, on, share) + 1e3 * gathered / (on.network * 1e9) + 1e-3 * on.latency * math.log2(ranks)


def table(on: Machine) -> str:
    head = ["model", "mode", "blocks", "MB", "GFLOP", "whole, ms", *(f"{r} ranks" for r in RANKS)]
    lines = [head, ["---"] * len(head)]
    for name in VITS:
        for mode in LAUNCHES:
            w = work(name, mode)
            alone = whole(w, on)
            cells = [f"{t:.1f} ({alone / t:.1f}×)" for t in (shared(w, r, on) for r in RANKS)]
            shape = [name, mode, f"{w.blocks} of {w.m}×{w.n}", f"{w.blocks * w.bytes / 1e6:.0f}"]
            lines.append([*shape, f"{w.blocks * w.flops / 1e9:.0f}", f"{alone:.1f}", *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in vars(Machine()).items():
        parser.add_argument(f"--{name}", type=float, default=default)
    print(table(Machine(**vars(parser.parse_args()))))


if __name__ == "__main__":
    main()
