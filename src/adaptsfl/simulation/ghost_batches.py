"""Whether mini-batches may be divided where batch-norm sees the parts, and into how many.

Batch-norm then normalises every part by itself: ghost batches, which a recipe allows by `training.ghost_batches`.
"""

from adaptsfl.config import PlannerConfig, TrainingConfig
from adaptsfl.decisions import Decision
from adaptsfl.errors import InvalidInput
from adaptsfl.latency import part_size
from adaptsfl.simulation.trainers import TrainerKind

LEAST_SAMPLES = 2  # in a part: deep layers may have one number per sample and channel, which has no variance


class GhostLimits(PlannerConfig):
    """The limits of a run with ghost batches: parts have at least two samples."""

    def parts(self, batch_size: int) -> tuple[int, ...]:
        """Return the numbers of parts of a mini-batch to choose from."""
        return tuple(k for k in super().parts(batch_size) if k == 1 or batch_size // k >= LEAST_SAMPLES)


def limits_with_batch_norm(limits: PlannerConfig, training: TrainingConfig) -> PlannerConfig:
    """Return the limits of a run whose model has batch-norm."""
    if limits.micro_batches != "auto":
        return limits
    if not training.ghost_batches:
        return limits.model_copy(update={"micro_batches": 1})
    return GhostLimits.model_validate(limits.model_dump())


def check_parts(decision: Decision, training: TrainingConfig, kind: TrainerKind, *, batch_norm: bool) -> None:
    """Refuse parts of mini-batches that are not equal, or that batch-norm may not or cannot normalise one by one."""
    k, field = decision.micro_batches, "decision.micro_batches"
    part = part_size(training.batch_size, k)
    if k == 1 or not batch_norm:
        return
    if not training.ghost_batches:
        problem = f"is {k}, but batch-norm looks at all samples of a mini-batch"
        remedy = "Choose 1 or another norm, or let it normalise every part by itself: training.ghost_batches = true"
        raise InvalidInput(field, problem, remedy)
    if not kind.divides:
        problem = f"is {k}, but batch-norm of trainer {kind.name!r} normalises whole mini-batches"
        raise InvalidInput(field, problem, "Give 1, or train with a policy of the trainer 'engine'")
    if part < LEAST_SAMPLES:
        problem = f"is {k}, which leaves batch-norm {part} sample in every part"
        raise InvalidInput(field, problem, f"Give a number that leaves at least {LEAST_SAMPLES}")
