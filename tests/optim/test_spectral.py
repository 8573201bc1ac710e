"""Stiefel Muon: its direction against a singular value decomposition, its free matrices against torch's Muon."""

import pytest
import torch
from torch import nn

from ortho_vit import StiefelParameter, optim, orthogonality_error
from ortho_vit.optim.spectral import msign
from ortho_vit.stiefel import polar, random_stiefel, sym


def test_singular_values_of_msign_are_near_one():
    D = torch.randn(5, 8, 30)
    O = msign(D, 5)
    P, _, Qh = torch.linalg.svd(D, full_matrices=False)
    values = torch.linalg.svdvals(O)
    assert values.min() > 0.65
    assert values.max() < 1.2
    inside = P.mT @ O @ Qh.mT  # the same singular vectors
    assert (inside - torch.diag_embed(inside.diagonal(dim1=-2, dim2=-1))).abs().max() < 1e-4
    assert torch.equal(msign(torch.zeros(1, 2, 3), 5), torch.zeros(1, 2, 3))


@pytest.mark.parametrize("shape", [(4, 12), (12, 4), (6, 6)])
def test_a_step_is_the_polar_factor_of_x_minus_msign_of_the_projected_momentum(shape):
    torch.manual_seed(0)
    X = random_stiefel(*shape, dtype=torch.float64)
    p, M = StiefelParameter(X.clone()), torch.zeros_like(X)
    optimizer = optim.StiefelMuon([p], lr=0.1, momentum=0.9)
    wide = shape[0] < shape[1]
    for _ in range(5):
        p.grad = torch.randn(shape, dtype=torch.float64)
        M = 0.9 * M + p.grad
        A, B = (X, M) if wide else (X.T, M.T)
        A = polar(A - 0.1 * msign((B - sym(B @ A.T) @ A)[None], 5)[0])
        X = A if wide else A.T
        optimizer.step()
        torch.testing.assert_close(p.detach(), X, rtol=0, atol=1e-10)


@pytest.mark.parametrize("lr", [1e-3, 0.1, 10.0])
def test_blocks_stay_on_the_manifold(lr):
    parameters = [StiefelParameter(random_stiefel(3, r, c)) for r, c in ((8, 40), (40, 8), (10, 10), (1, 5))]
    optimizer = optim.StiefelMuon(parameters, lr=lr)
    for i in range(60):
        for p in parameters:
            p.grad = torch.sin(3 * p.detach() + i)
        optimizer.step()
        assert max(map(orthogonality_error, parameters)) < 2e-6


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(10, 24), (24, 10)])
def test_free_matrices_follow_torch_muon_and_the_rest_adamw(shape, adjust):
    """torch computes msign in bfloat16, so a step agrees to a hundredth of its length."""
    torch.manual_seed(0)
    start, bias = torch.randn(shape), torch.randn(7)
    W, b, theirs, c = (nn.Parameter(x.clone()) for x in (start, bias, start, bias))
    ours = optim.StiefelMuon([W, b], lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn=adjust)
    muon = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn=adjust)
    adamw = torch.optim.AdamW([c], lr=0.02, weight_decay=0.1)
    for _ in range(3):
        W.grad, b.grad = torch.randn(shape), torch.randn(7)
        theirs.grad, c.grad = W.grad.clone(), b.grad.clone()
        before = theirs.detach().clone()
        for optimizer in (ours, muon, adamw):
            optimizer.step()
    length = (theirs.detach() - before).abs().max()
    assert (W - theirs).abs().max() < 0.05 * length
    assert torch.equal(b, c)


def test_a_gradient_without_a_tangent_part_moves_nothing():
    torch.manual_seed(0)
    p = StiefelParameter(random_stiefel(32, 96))
    before = p.detach().clone()
    optimizer = optim.StiefelMuon([p], lr=0.1)
    p.grad = 3 * before
    optimizer.step()
    assert (p - before).abs().max() < 1e-6
