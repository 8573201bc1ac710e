"""Vision Transformers with orthogonal attention: the zoo, and `orthogonalize` for any other."""

from ortho_vit.models.orthogonalize import orthogonalize
from ortho_vit.models.registry import create_model, list_models

__all__ = ["create_model", "list_models", "orthogonalize"]
