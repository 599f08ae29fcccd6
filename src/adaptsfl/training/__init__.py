"""Training by split federated learning with one cut per device."""

from adaptsfl.training.checkpoint import Checkpoint, has_checkpoint, load_checkpoint, save_checkpoint
from adaptsfl.training.engine import Engine
from adaptsfl.training.loop import RoundRecord, train
from adaptsfl.training.passes import ChunkForward
from adaptsfl.training.reference import Reference
from adaptsfl.training.schedule import Schedule
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
from adaptsfl.training.trainer import Trainer
from adaptsfl.training.variants import PooledEngine, Sequential

__all__ = [
    "Batch",
    "Batches",
    "Checkpoint",
    "ChunkForward",
    "Engine",
    "EngineState",
    "Loss",
    "OptimizerSettings",
    "PooledEngine",
    "Reference",
    "RoundRecord",
    "Schedule",
    "Sequential",
    "StateRule",
    "Statistics",
    "Trainer",
    "TrainingWarning",
    "has_checkpoint",
    "load_checkpoint",
    "sample_cross_entropy",
    "save_checkpoint",
    "train",
]
