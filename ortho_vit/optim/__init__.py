"""Optimizers for models with Stiefel parameters: real `torch.optim.Optimizer`s, for constrained and free ones alike."""

from ortho_vit.optim.audit import audit as audit
from ortho_vit.optim.momentum import StiefelAdam, StiefelAdamW, StiefelSGD
from ortho_vit.optim.momentumless import MomentumlessStiefelSGD
from ortho_vit.optim.projected import ProjectedStiefelAdam, ProjectedStiefelSGD
from ortho_vit.optim.regularized import RegularizedAdam, RegularizedSGD
from ortho_vit.optim.spectral import StiefelMuon

__all__ = [
    "MomentumlessStiefelSGD",
    "ProjectedStiefelAdam",
    "ProjectedStiefelSGD",
    "RegularizedAdam",
    "RegularizedSGD",
    "StiefelAdam",
    "StiefelAdamW",
    "StiefelMuon",
    "StiefelSGD",
]

for _name in __all__:  # where users find them, and what run checkpoints name
    globals()[_name].__module__ = __name__
