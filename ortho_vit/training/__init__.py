"""Training: the LightningModule, its callbacks, and the checkpoints of runs."""

from ortho_vit.training.checkpointing import AtomicCheckpointIO, Checkpoints
from ortho_vit.training.classifier import Classifier
from ortho_vit.training.images import AttentionImages
from ortho_vit.training.measuring import OrthogonalityMonitor, WeightAveraging
from ortho_vit.training.predictions import PerClass, PredictionWriter
from ortho_vit.training.reporting import History

__all__ = [
    "AtomicCheckpointIO",
    "AttentionImages",
    "Checkpoints",
    "Classifier",
    "History",
    "OrthogonalityMonitor",
    "PerClass",
    "PredictionWriter",
    "WeightAveraging",
]
