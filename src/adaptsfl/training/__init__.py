"""Training by split federated learning with one cut per device."""

from adaptsfl.training.checkpoint import Checkpoint, Resumable, has_checkpoint, load_checkpoint, save_checkpoint
from adaptsfl.training.engine import ChunkForward, Engine
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
from adaptsfl.training.snapshot import EngineState
from adaptsfl.training.variants import Sequential, federated_averaging, parallel_split

__all__ = [
    "Batch",
    "Batches",
    "Checkpoint",
    "ChunkForward",
    "Engine",
    "EngineState",
    "Loss",
    "OptimizerSettings",
    "Reference",
    "Resumable",
    "RoundRecord",
    "Schedule",
    "Sequential",
    "StateRule",
    "Statistics",
    "Trainer",
    "TrainingPlan",
    "TrainingWarning",
    "federated_averaging",
    "has_checkpoint",
    "load_checkpoint",
    "parallel_split",
    "sample_cross_entropy",
    "save_checkpoint",
    "train",
]
