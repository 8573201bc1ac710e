"""Draw the figures of docs/concepts.md: python docs/scripts/draw_concepts.py

Both use the package: the steps are those of `ortho_vit.optim.reference`, the Gram matrices those of constrained weights.
"""

import math
import sys
from pathlib import Path

import matplotlib
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from matplotlib import pyplot as plt  # noqa: E402

from ortho_vit import StiefelParameter  # noqa: E402
from ortho_vit.optim import reference  # noqa: E402
from ortho_vit.stiefel import polar  # noqa: E402

# Colour-blind readers can distinguish them
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#777777"
LR = 0.8


def step(integrator: str, X: Tensor, U: Tensor, steps: int = 1) -> tuple[Tensor, list[float]]:
    """X and U after steps without a gradient or friction, as one (n, 2) matrix, and ‖U‖ before each step and at the end."""
    optimizer = reference.StiefelSGD(X, lr=LR, momentum=1.0, integrator=integrator)
    optimizer.U = U
    lengths = [float(U.norm())]
    for _ in range(steps):
        X = optimizer.step(X, torch.zeros_like(X))
        lengths.append(float(optimizer.U.norm()))
    return torch.cat([X, optimizer.U], dim=1), lengths


def draw_step(path: Path) -> None:
    """One long step on the circle by both integrators, and the size of the momentum over many."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.4))
    X = torch.tensor([[math.cos(0.35)], [math.sin(0.35)]], dtype=torch.float64)
    U = torch.tensor([[-math.sin(0.35)], [math.cos(0.35)]], dtype=torch.float64)
    angles = torch.linspace(-0.15, 2.0, 200)
    left.plot(angles.cos(), angles.sin(), color="black", lw=1.5)
    end = X + LR * U
    new = {name: step(name, X, U)[0] for name in ("paper", "isometric")}
    P = new["isometric"][:, 0]
    arrow(left, X[:, 0], end[:, 0], GREY, "--")
    arrow(left, end[:, 0], P, GREY, ":")
    arrow(left, X[:, 0], (X + 0.55 * U)[:, 0], BLUE)
    arrow(left, P, P + 0.55 * new["paper"][:, 1], ORANGE)
    arrow(left, P, P + 0.55 * new["isometric"][:, 1], GREEN)
    for point in (X[:, 0], P):
        left.plot(*point.tolist(), "o", color="black", ms=6)
    left.text(*(X[:, 0] + torch.tensor([0.04, -0.04])).tolist(), "X", fontsize=13)
    left.text(*(P + torch.tensor([-0.17, -0.14])).tolist(), "new X", fontsize=13)
    left.text(*(end[:, 0] + torch.tensor([0.03, 0.0])).tolist(), "X + ηU", fontsize=12, color=GREY)
    left.text(*(X + 0.3 * U)[:, 0].add(torch.tensor([0.04, -0.01])).tolist(), "U", fontsize=13, color=BLUE)
    for name, offset, colour, text in (
        ("paper", (-0.06, 0.06), ORANGE, "U, printed"),
        ("isometric", (0.0, -0.36), GREEN, "U, isometric"),
    ):
        tip = P + 0.55 * new[name][:, 1] + torch.tensor(offset)
        left.text(*tip.tolist(), text, fontsize=12, color=colour, ha="center")
    left.set(
        aspect="equal", xlim=(-0.4, 1.3), ylim=(-0.1, 1.35), title=f"one step on the circle, η‖U‖ = {LR}"
    )
    left.axis("off")
    for name, colour, style in (("paper", ORANGE, "--"), ("isometric", GREEN, "-")):
        label = "printed" if name == "paper" else name
        right.plot(step(name, X, U, 6)[1], style, color=colour, marker="o", label=label)
    right.set(
        xlabel="steps without gradient or friction",
        ylabel="‖U‖",
        yscale="log",
        title="what becomes of the momentum",
    )
    right.legend(frameon=False)
    right.grid(alpha=0.3)
    save(figure, path)


def arrow(axes, start: Tensor, end: Tensor, colour: str, style: str = "-") -> None:
    options = {"arrowstyle": "-|>", "color": colour, "lw": 2, "ls": style, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end.tolist(), start.tolist(), arrowprops=options)


def draw_blocks(path: Path) -> None:
    """|W Wᵀ| of one projection with four heads of four rows, for each constraint."""
    torch.manual_seed(0)
    W = torch.randn(16, 24, dtype=torch.float64)
    figure, axes = plt.subplots(1, 3, figsize=(10, 3.8), layout="constrained")
    titles = ('"within": 4 blocks', "2 heads share a block: 2 blocks", '"across": 1 block')
    for ax, title, blocks in zip(axes, titles, (4, 2, 1), strict=True):
        X = polar(StiefelParameter(W.clone(), blocks=blocks).matrices()).reshape(16, 24)
        shown = ax.imshow((X @ X.T).abs(), cmap="cividis", vmin=0, vmax=1)
        for head in range(1, 4):
            ax.axhline(4 * head - 0.5, color="white", lw=0.7)
            ax.axvline(4 * head - 0.5, color="white", lw=0.7)
        ax.set(title=title, xticks=[1.5, 5.5, 9.5, 13.5], yticks=[1.5, 5.5, 9.5, 13.5])
        ax.set_xticklabels([f"head {i}" for i in range(1, 5)])
        ax.set_yticklabels([str(i) for i in range(1, 5)])
        ax.tick_params(length=0)
    figure.colorbar(shown, ax=axes, label="|W Wᵀ|", shrink=0.8)
    save(figure, path)


def save(figure, path: Path) -> None:
    figure.savefig(path, dpi=130, bbox_inches="tight", facecolor="white", metadata={"Software": None})
    plt.close(figure)
    print(path)


def main(folder: Path = ROOT / "docs" / "images") -> None:
    matplotlib.use("agg")
    folder.mkdir(parents=True, exist_ok=True)
    draw_step(folder / "step.png")
    draw_blocks(folder / "blocks.png")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
