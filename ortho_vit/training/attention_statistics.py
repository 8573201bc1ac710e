"""Statistics of the heads of a model while it trains: the size of their logits, the spectra of W^Q, W^K and their product.

    logit_max        the largest logit q·k/√d_k over the images, queries and keys
    entropy          of the attention probabilities, mean over images and queries; log N nats where all N keys get the same
    q_max, q_min     largest and smallest singular value of the head's W^Q ∈ ℝ^(d_k × d_model); k_max, k_min of its W^K
    qk_max, qk_min   the same of the bilinear form W^Qᵀ W^K, which has rank d_k: the smallest is the d_k-th
    effective_rank   of the bilinear form: exp of the entropy of its singular values divided by their sum, between 1 and d_k

Where W^Q and W^K have orthonormal rows, all of these singular values are 1 and the effective rank is d_k.
"""

import contextlib
from functools import partial
from typing import Any

import lightning as L
import timm.layers
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from ortho_vit.models.attention import Attention, find_attention
from ortho_vit.stiefel import working_dtype

Statistics = dict[str, Tensor]  # each (heads,)


class AttentionStatistics(Callback):
    """Measures every head after the last batch of each epoch, and logs `attention/<statistic>/<attention>.<head>`.

    Logits and entropies are those of the last training images, evaluated once more.  They are measured only for timm's own
    attention, whose queries and keys can be read.  `latest` has the last values, for `Recorder`.

    Args:
        images: the number of images.
    """

    def __init__(self, images: int = 32) -> None:
        if images < 1:
            raise ValueError(f"AttentionStatistics: images must be at least 1, got {images}")
        self.images = images
        self.latest: dict[str, dict[str, list[float]]] = {}  # by attention and statistic: one value per head
        self._last_images: Tensor | None = None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Before any callback's `on_train_epoch_end`, where the values are read."""
        previous = [] if self._last_images is None else [self._last_images]
        self._last_images = torch.cat([*previous, batch[0][-self.images :]])[-self.images :].clone()
        if not trainer.is_last_batch:
            return
        measured = attention_statistics(pl_module.model, self._last_images)  # type: ignore[arg-type]
        self.latest = {
            path: {
                name: [float(f"{value:.5g}") for value in values.tolist()] for name, values in heads.items()
            }
            for path, heads in measured.items()
        }
        scalars = {
            f"attention/{name}/{path}.{head}": value
            for path, statistics in self.latest.items()
            for name, values in statistics.items()
            for head, value in enumerate(values)
        }
        for logger in trainer.loggers:
            logger.log_metrics(scalars, step=trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        """A run may be stopped between the last batch of an epoch and its end, where `Recorder` reads the values."""
        return {"latest": self.latest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.latest = state_dict["latest"]


@torch.no_grad()
def attention_statistics(model: nn.Module, images: Tensor) -> dict[str, Statistics]:
    """The statistics of every attention of the model, by its path; the model stays as it is."""
    found, training = find_attention(model), model.training
    queries_and_keys: dict[str, list[Tensor]] = {}  # (B, h, N, d_k) each, after a norm if there is one
    with contextlib.ExitStack() as hooks, torch.compiler.set_stance("force_eager"):
        for attention in found:
            if isinstance(attention.module, timm.layers.Attention):
                keep = partial(_keep, queries_and_keys.setdefault(attention.path, []))
                for norm in (attention.module.q_norm, attention.module.k_norm):
                    hooks.enter_context(norm.register_forward_hook(keep))
        model.eval()(images)
    model.train(training)
    return {a.path: _of_logits(a.module, *queries_and_keys.get(a.path, ())) | _of_weights(a) for a in found}


def _keep(record: list[Tensor], module: nn.Module, inputs: Any, output: Tensor) -> None:
    record.append(output.to(working_dtype(output.dtype)))


def _of_logits(module: Any, *queries_and_keys: Tensor) -> Statistics:
    if not queries_and_keys:
        return {}
    q, k = queries_and_keys
    logits = q * module.scale @ k.mT  # B, h, N, N
    p = logits.softmax(-1)
    entropy = -torch.special.xlogy(p, p).sum(-1)
    return {"logit_max": logits.amax((0, 2, 3)), "entropy": entropy.mean((0, 2))}


def _of_weights(attention: Attention) -> Statistics:
    """From triangular factors: W^Qᵀ = Q R has the singular values of R, and W^Qᵀ W^K those of R_q R_kᵀ."""
    q, k = (_heads(attention, part) for part in "qk")  # h, d_k, d_model
    k = k.repeat_interleave(len(q) // len(k), 0)  # where several heads share a key
    R_q, R_k = (torch.linalg.qr(W.mT, mode="r").R for W in (q, k))
    S = torch.linalg.svdvals(torch.stack([R_q, R_k, R_q @ R_k.mT]))  # 3, h, d_k
    statistics: Statistics = {}
    for name, s in zip(("q", "k", "qk"), S, strict=True):
        statistics |= {f"{name}_max": s[:, 0], f"{name}_min": s[:, -1]}
    share = S[2] / S[2].sum(-1, keepdim=True).clamp_min(torch.finfo(S.dtype).tiny)
    return statistics | {"effective_rank": (-torch.special.xlogy(share, share).sum(-1)).exp()}


def _heads(attention: Attention, part: str) -> Tensor:
    W = next(p.heads_of(part) for p in attention.projections if part in p.parts)
    return W.detach().to(working_dtype(W.dtype))
