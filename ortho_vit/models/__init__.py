"""Vision Transformers with orthogonal attention: the zoo, its trained weights, and `orthogonalize` for any other."""

from ortho_vit.errors import CheckpointError
from ortho_vit.models.attention import conv1d_to_linear
from ortho_vit.models.card import Card
from ortho_vit.models.hub import export_for_hub, save_checkpoint
from ortho_vit.models.orthogonalize import orthogonalize, release
from ortho_vit.models.spec import ModelSpec
from ortho_vit.models.weights import Checkpoint, find_checkpoint
from ortho_vit.models.zoo import create_model, list_models, load_checkpoint, verify_checkpoint

__all__ = [
    "Card", "Checkpoint", "CheckpointError", "ModelSpec", "conv1d_to_linear", "create_model", "export_for_hub",
    "find_checkpoint", "list_models", "load_checkpoint", "orthogonalize", "release", "save_checkpoint", "verify_checkpoint",
]  # fmt: skip
