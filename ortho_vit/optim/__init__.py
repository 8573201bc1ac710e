"""Optimizers for models with Stiefel parameters: real `torch.optim.Optimizer`s, for constrained and free ones alike."""

from ortho_vit.optim.momentum import StiefelAdam, StiefelSGD
from ortho_vit.optim.momentumless import MomentumlessStiefelSGD
from ortho_vit.optim.projected import ProjectedStiefelAdam, ProjectedStiefelSGD
from ortho_vit.optim.regularized import RegularizedAdam, RegularizedSGD

__all__ = [
    "MomentumlessStiefelSGD",
    "ProjectedStiefelAdam",
    "ProjectedStiefelSGD",
    "RegularizedAdam",
    "RegularizedSGD",
    "StiefelAdam",
    "StiefelSGD",
]
