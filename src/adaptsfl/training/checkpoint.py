"""Checkpoints: one safetensors file for all tensors, and one JSON manifest that names it.

A checkpoint is replaced atomically. The tensors are written first, under a new name; then the manifest replaces the
older one; then the older tensors are removed. If the program stops at any point, there is a manifest, and the tensors
that it names are complete. A folder belongs to one run at a time.

Several ranks write one checkpoint. Every rank writes a file with the copies of its own devices. The first rank's file
also has everything else; it then writes the manifest, which lists all files with their devices. Any number of ranks can
read the checkpoint.
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adaptsfl.decisions import Decision
from adaptsfl.errors import NotWritten, TrainingDiverged
from adaptsfl.training.manifest import (
    MANIFEST,
    incomplete,
    plain,
    read_manifest,
    read_part,
    reason,
    remove_unnamed,
    write_manifest,
    write_part,
)
from adaptsfl.training.ranks import ALONE, Ranks
from adaptsfl.training.snapshot import EngineState
from adaptsfl.training.trainer import Trainer

OWN = "own"  # prefix of tensors that hold the copies of one rank's devices


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint.

    Attributes:
        state: for `restore` of a trainer with the same model, devices and settings.
        extra, tensors: what the caller of `save_checkpoint` added.
        random: the states of torch's generators, from which dropout draws.
    """

    state: EngineState
    extra: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    random: Mapping[str, Tensor]

    def resume(self, trainer: Trainer) -> None:
        """Restore the trainer and the random generators: the next round is the same as without the interruption."""
        trainer.restore(self.state)
        torch.set_rng_state(self.random["cpu"])
        for name, state in self.random.items():
            if name != "cpu" and int(name) < torch.cuda.device_count():
                torch.cuda.set_rng_state(state, int(name))


def has_checkpoint(folder: Path) -> bool:
    """Whether `folder` has a checkpoint, valid or damaged."""
    return (folder / MANIFEST).is_file()


def remove_checkpoint(folder: Path) -> None:
    """Remove the checkpoint of a folder."""
    (folder / MANIFEST).unlink(missing_ok=True)
    remove_unnamed(folder)


def save_checkpoint(
    folder: Path,
    state: EngineState,
    *,
    extra: Mapping[str, Any],
    identity: Mapping[str, Any],
    tensors: Mapping[str, Tensor] | None = None,
    ranks: Ranks = ALONE,
) -> None:
    """Write everything that `load_checkpoint` returns, and replace the folder's older checkpoint.

    Weights with NaN or infinity are refused, so a run that diverges keeps its older checkpoint.

    On several ranks all call it, each with its own snapshot, for a folder that all of them see. An error on one rank is
    raised on all.

    Args:
        extra: data of the caller that JSON can hold; floats are restored exactly, also NaN and infinity.
        identity: describes the run to which the checkpoint belongs; `load_checkpoint` compares it.
        tensors: further tensors of the caller.
    """
    content = {"identity": plain("identity", identity), "extra": plain("extra", extra)}
    name = ranks.broadcast(f"checkpoint-{state.round}-{secrets.token_hex(6)}")
    name += ".safetensors" if ranks.size == 1 else f"-rank{ranks.rank}.safetensors"
    try:
        with _agreed(ranks, folder):
            _check_finite(state)
            written = _tensors(state, tensors or {}, ranks)
            part = Part(write_part(folder / name, written) if written else None, state.shard, state.steps)
        parts = ranks.all_gather(part)
        with _agreed(ranks, folder):
            if ranks.first:
                write_manifest(folder, {**content, **_described(state, parts)})
    finally:
        if ranks.first:
            remove_unnamed(folder)


@contextmanager
def _agreed(ranks: Ranks, folder: Path) -> Iterator[None]:
    """Explain why a checkpoint cannot be written, and raise an error of one rank on all ranks."""
    failure: NotWritten | TrainingDiverged | None = None
    try:
        yield
    except (NotWritten, TrainingDiverged) as error:
        failure = error
    except OSError as error:
        kept_one = "; the older checkpoint is still there" if has_checkpoint(folder) else ""
        remedy = f"Free some space, or give a folder that can be written{kept_one}."
        failure = NotWritten(f"{folder}: the checkpoint cannot be written ({reason(error)}). {remedy}")
        failure.__cause__ = error
    failures = [one for one in ranks.all_gather(failure) if one is not None]
    if failures:
        raise failure or failures[0]


class Part(NamedTuple):
    """What one rank wrote.

    Attributes:
        file: its name and checksum; None where there was nothing to write.
        devices: whose copies are in it; None for all devices, in one process.
        steps: as in `EngineState`.
    """

    file: dict[str, str] | None
    devices: tuple[int, ...] | None
    steps: tuple[tuple[int, ...], ...]


def _described(state: EngineState, parts: Sequence[Part]) -> dict[str, Any]:
    """Return the manifest's description of the files that all ranks wrote."""
    described, first = _state(state), parts[0]
    if first.devices is None:
        return {"state": described, "tensors": first.file}
    steps: list[Sequence[int]] = []
    for n, own in enumerate(state.steps):
        counted = {k: count for part in parts for k, count in zip(part.devices or (), part.steps[n], strict=False)}
        steps.append(own if len(own) == 1 else [counted[k] for k in sorted(counted)])
    described["steps"] = steps
    files = [{**part.file, "devices": part.devices} for part in parts if part.file is not None]
    return {"state": described, "tensors": first.file, "parts": files}


def read_extra(folder: Path, *, identity: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the `extra` of `save_checkpoint`, without reading any tensors."""
    extra: Mapping[str, Any] = read_manifest(folder, identity)["extra"]
    return extra


def load_checkpoint(folder: Path, *, identity: Mapping[str, Any], devices: Sequence[int] | None = None) -> Checkpoint:
    """Return the folder's checkpoint, if it is undamaged and belongs to the run that `identity` describes.

    Args:
        devices: those of this rank, where there are several: only their copies are kept in memory.
    """
    content = read_manifest(folder, identity)
    try:
        # A rank without devices gets copies that do not count: there are at least two rows (`EngineState.shard`).
        rows = None if devices is None else [*devices, *[0] * (2 - len(devices))]
        found = _read_parts(folder, content, rows)
        state = _state_from(content["state"], found, rows, None if devices is None else tuple(devices))
        return Checkpoint(state, content["extra"], _group(found, "extra"), _group(found, "random"))
    except (KeyError, TypeError, ValueError) as error:
        raise incomplete(folder, error) from error


def _read_parts(folder: Path, content: Mapping[str, Any], rows: Sequence[int] | None) -> dict[str, Tensor]:
    """Return the tensors of all files, with the copies of the devices `rows`, by default of all.

    Files are mapped into memory, so that copies of other devices are not kept there.
    """
    first = content["tensors"]
    found = read_part(folder, first)
    wanted = range(len(content["state"]["cuts"])) if rows is None else rows
    copies: dict[str, dict[int, Tensor]] = {}
    for part in content.get("parts", ()):
        held = {device: row for row, device in enumerate(part["devices"]) if device in wanted}
        if held:
            tensors = found if part["file"] == first["file"] else read_part(folder, part)
            for name, stacked in _group(tensors, OWN).items():
                copies.setdefault(name, {}).update({device: stacked[row] for device, row in held.items()})
    if rows is not None:  # select from a checkpoint that one process wrote
        picked = [name for name, tensor in found.items() if name.startswith("layer.") and len(tensor) > 1]
        found |= {name: found[name][list(rows)] for name in picked}
    return found | {name: torch.stack([of[device] for device in wanted]) for name, of in copies.items()}


def _tensors(state: EngineState, extra: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Return all tensors that this rank writes, by name, contiguous and on the CPU."""
    layers: dict[str, Tensor] = {}
    for number, layer in enumerate(state.tensors, start=1):
        for name, rows in layer.items():
            if state.shard is None or len(rows) == 1:
                layers[f"layer.{number}.{name}"] = rows.cpu().contiguous()
            elif state.shard:
                layers[f"{OWN}.layer.{number}.{name}"] = rows[: len(state.shard)].cpu().contiguous()
    if not ranks.first:
        return {name: tensor for name, tensor in layers.items() if name.startswith(OWN)}
    random = {"random.cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        random |= {f"random.{k}": generator for k, generator in enumerate(torch.cuda.get_rng_state_all())}
    # safetensors refuses tensors that share memory, as the caller's may.
    own = {f"extra.{name}": value.detach().cpu().contiguous().clone() for name, value in extra.items()}
    return {**random, **layers, **own}


def _state(state: EngineState) -> dict[str, Any]:
    plan = state.plan
    return {
        "cuts": plan.cuts,
        "interval": plan.interval,
        "placed": plan.placed,
        "micro_batches": plan.micro_batches,
        "wire_dtype": plan.wire_dtype,
        "layer_intervals": {str(layer): interval for layer, interval in plan.layer_intervals.items()},
        "round": state.round,
        "planned_at": state.planned_at,
        "ages": state.ages,
        "steps": state.steps,
        "present": state.present,
    }


def _state_from(
    data: Mapping[str, Any], tensors: Mapping[str, Tensor], rows: Sequence[int] | None, shard: tuple[int, ...] | None
) -> EngineState:
    intervals = {int(layer): interval for layer, interval in data["layer_intervals"].items()}
    newer = {key: data[key] for key in ("placed", "micro_batches", "wire_dtype") if key in data}
    return EngineState(
        Decision(tuple(data["cuts"]), data["interval"], intervals, **newer),
        data["round"],
        data["planned_at"],
        tuple(data["ages"]),
        tuple(
            tuple(steps) if rows is None or len(steps) == 1 else tuple(steps[k] for k in rows)
            for steps in data["steps"]
        ),
        tuple(_group(tensors, f"layer.{number}") for number in range(1, len(data["steps"]) + 1)),
        tuple(data["present"]),
        shard,
    )


def _group(tensors: Mapping[str, Tensor], group: str) -> dict[str, Tensor]:
    prefix = f"{group}."
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _check_finite(state: EngineState) -> None:
    """Refuse weights with NaN or infinity; the loss does not show them, as it is computed before the round's update."""
    for number, layer in enumerate(state.tensors, start=1):
        for name, tensor in layer.items():
            # Parameters only: a buffer may hold infinities on purpose, as masks of attention do.
            if name.startswith("parameters.") and not torch.isfinite(tensor).all():
                where = f"round {state.round}: {name.removeprefix('parameters.')} of layer {number}"
                remedy = "Lower the learning rate, or use a model with normalisation"
                raise TrainingDiverged(f"{where} has weights that are not finite. {remedy}. No checkpoint was written.")
