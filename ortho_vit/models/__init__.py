"""Vision Transformers with orthogonal attention: the zoo, its trained weights, and `orthogonalize` for any other."""

from ortho_vit.errors import CheckpointError
from ortho_vit.models.card import Card
from ortho_vit.models.hub import export_for_hub, save_checkpoint
from ortho_vit.models.orthogonalize import orthogonalize
from ortho_vit.models.registry import create_model, list_models
from ortho_vit.models.weights import Checkpoint, find_checkpoint, load_checkpoint

__all__ = [
    "Card",
    "Checkpoint",
    "CheckpointError",
    "create_model",
    "export_for_hub",
    "find_checkpoint",
    "list_models",
    "load_checkpoint",
    "orthogonalize",
    "save_checkpoint",
]
