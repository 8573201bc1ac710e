"""Entropic optimal transport, and projections on the Stiefel manifold that make two point clouds hardest to match."""

from ortho_vit.transport.projection import RAGAS, RGAS, ProjectionResult, projection_robust_wasserstein
from ortho_vit.transport.sinkhorn import SinkhornResult, sinkhorn

__all__ = ["RAGAS", "RGAS", "ProjectionResult", "SinkhornResult", "projection_robust_wasserstein", "sinkhorn"]
