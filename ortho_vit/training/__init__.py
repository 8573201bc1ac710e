"""Training: the LightningModule, its callbacks and the command line."""

from ortho_vit.training.callbacks import OrthogonalityMonitor, PredictionWriter, WeightAveraging
from ortho_vit.training.checkpoints import AtomicCheckpointIO, Checkpoints
from ortho_vit.training.images import AttentionImages
from ortho_vit.training.module import Classifier
from ortho_vit.training.report import History

__all__ = [
    "AtomicCheckpointIO",
    "AttentionImages",
    "Checkpoints",
    "Classifier",
    "History",
    "OrthogonalityMonitor",
    "PredictionWriter",
    "WeightAveraging",
]
