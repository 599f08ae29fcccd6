"""Training by split federated learning with one cut per device."""

from adaptsfl.training.engine import ChunkForward, Engine
from adaptsfl.training.reference import Reference
from adaptsfl.training.schedule import Schedule, TrainingPlan
from adaptsfl.training.settings import (
    Batch,
    Batches,
    Loss,
    OptimizerSettings,
    StateRule,
    Statistics,
    TrainingWarning,
    sample_cross_entropy,
)

__all__ = [
    "Batch",
    "Batches",
    "ChunkForward",
    "Engine",
    "Loss",
    "OptimizerSettings",
    "Reference",
    "Schedule",
    "StateRule",
    "Statistics",
    "TrainingPlan",
    "TrainingWarning",
    "sample_cross_entropy",
]
