"""Vision Transformers with orthogonal attention, and the Stiefel optimizers that keep it exact."""

from ortho_vit import _torchvision  # noqa: F401  (before anything imports torchvision)
from ortho_vit.models import create_model, list_models, orthogonalize
from ortho_vit.parameter import StiefelParameter, constrain, stiefel_parameters
from ortho_vit.stiefel import orthogonality_error

__all__ = [
    "StiefelParameter",
    "constrain",
    "create_model",
    "list_models",
    "orthogonality_error",
    "orthogonalize",
    "stiefel_parameters",
]
