"""Training by split federated learning with one cut per device."""

from adaptsfl.training.engine import ChunkForward, Engine, EngineState
from adaptsfl.training.loop import RoundRecord, Trainer, train
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
from adaptsfl.training.variants import Sequential, federated_averaging, parallel_split

__all__ = [
    "Batch",
    "Batches",
    "ChunkForward",
    "Engine",
    "EngineState",
    "Loss",
    "OptimizerSettings",
    "Reference",
    "RoundRecord",
    "Schedule",
    "Sequential",
    "StateRule",
    "Statistics",
    "Trainer",
    "TrainingPlan",
    "TrainingWarning",
    "federated_averaging",
    "parallel_split",
    "sample_cross_entropy",
    "train",
]
