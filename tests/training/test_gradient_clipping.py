"""What Lightning's `gradient_clip_val` does to the gradient of a constrained block."""

from functools import partial

import pytest
import torch

from ortho_vit import stiefel_parameters
from ortho_vit.optim import StiefelSGD
from ortho_vit.parameter import cut_blocks
from ortho_vit.stiefel import orthogonality_error
from ortho_vit.training import Classifier
from tests.helpers.small_run import digits, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec")


class Clipped(Classifier):
    """Keeps the gradients of every step, before and after they are clipped."""

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        before = self.gradients()
        super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
        self.seen.append((before, self.gradients(), dict(self.weights())))

    def gradients(self):
        return {name: p.grad.clone() for name, p in self.model.named_parameters()}

    def weights(self):
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def blocks(self, values):
        """The constrained blocks among some values, (B, m, n), their rows orthonormal where they are weights."""
        return torch.cat(
            [cut_blocks(values[name], p.blocks, p.rows) for name, p in stiefel_parameters(self.model)]
        )


def tangent(X, G):
    """The part of G (B, m, n) along the manifold of orthonormal rows at X."""
    product = G @ X.mT
    return G - (product + product.mT) / 2 @ X


def norm(gradients):
    return torch.stack([g.norm() for g in gradients.values()]).norm().item()


def fit(folder, **clipping):
    torch.manual_seed(0)
    model = Clipped("ortho_vit_digits", partial(StiefelSGD, lr=0.1), num_classes=10)
    model.seen = []
    make_trainer(folder, max_epochs=2, **clipping).fit(model, datamodule=digits())
    assert orthogonality_error(model) < 1e-5
    return model


def test_clipping_by_norm_counts_the_normal_part_and_keeps_the_direction(tmp_path):
    model = fit(tmp_path, gradient_clip_val=0.5)
    overestimates = []
    for before, after, weights in model.seen:
        assert norm(before) > 0.5
        assert norm(after) == pytest.approx(0.5, rel=1e-4)
        X, old, new = model.blocks(weights), model.blocks(before), model.blocks(after)
        torch.testing.assert_close(
            tangent(X, new), tangent(X, old) * (0.5 / norm(before)), atol=1e-6, rtol=1e-4
        )
        normal = (old.square().sum() - tangent(X, old).square().sum()).item()
        overestimates.append(norm(before) / (norm(before) ** 2 - normal) ** 0.5)
    assert len(overestimates) == 8
    assert 1 < max(overestimates) < 1.001  # measured: 1.0003


def test_clipping_by_value_changes_the_direction(tmp_path):
    model = fit(tmp_path, gradient_clip_val=1e-3, gradient_clip_algorithm="value")
    before, after, weights = model.seen[0]
    assert max(g.abs().max() for g in after.values()) <= 1e-3
    X = model.blocks(weights)
    old, new = (tangent(X, model.blocks(g)).flatten() for g in (before, after))
    assert torch.cosine_similarity(old, new, dim=0) < 0.99


def test_the_normal_part_of_a_gradient_moves_nothing():
    torch.manual_seed(0)
    model = Clipped("ortho_vit_digits", partial(StiefelSGD, lr=0.1), num_classes=10)
    parameter = next(p for _, p in stiefel_parameters(model.model))
    start = parameter.detach().clone()
    moved = []
    for size in (0.0, 10.0):
        with torch.no_grad():
            parameter.copy_(start)
        optimizer = StiefelSGD([parameter], lr=0.1, momentum=0.0)
        torch.manual_seed(1)
        parameter.grad = torch.randn_like(start)
        S = torch.randn(parameter.blocks, *[len(parameter.matrices()[0])] * 2)
        G = cut_blocks(parameter.grad, parameter.blocks, parameter.rows)
        G += size * (S + S.mT) @ parameter.matrices()
        optimizer.step()
        moved.append(parameter.detach().clone())
    torch.testing.assert_close(moved[0], moved[1], atol=1e-5, rtol=0)
    assert (moved[0] - start).abs().max() > 0.01
