"""A training run kept on disk: one safetensors file for all tensors, and one JSON manifest that names it.

The pair changes at one instant. The tensors are written first, under a name that was never used; then the manifest
takes the place of the older one; then the older tensors are removed. Whatever stops the program on the way, there is a
manifest, and the tensors that it names are whole. A folder belongs to one run at a time.

Several ranks write one checkpoint: every rank a file with the copies of its own devices, the first also what there is
one of, and then the manifest, which names all files and says whose copies they hold. Any number of ranks reads it.
"""

import hashlib
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from adaptsfl.decisions import Decision
from adaptsfl.errors import InvalidInput, NotWritten, TrainingDiverged
from adaptsfl.files import TEMPORARY, replace_file, write_tensors
from adaptsfl.training.ranks import ALONE, Ranks
from adaptsfl.training.snapshot import EngineState
from adaptsfl.training.trainer import Trainer

FORMAT = "adaptsfl-checkpoint-1"  # another number where older files cannot be read any more
MANIFEST = "checkpoint.json"
OWN = "own"  # tensors of a rank's own devices
ANEW = "Begin the run anew in an empty folder, or restore the folder from a copy"


@dataclass(frozen=True)
class Checkpoint:
    """What a folder held.

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
        """Put trainer and random generators where they were: the next round is the one that would have come."""
        trainer.restore(self.state)
        torch.set_rng_state(self.random["cpu"])
        for name, state in self.random.items():
            if name != "cpu" and int(name) < torch.cuda.device_count():
                torch.cuda.set_rng_state(state, int(name))


def has_checkpoint(folder: Path) -> bool:
    """Whether a checkpoint was ever written into `folder`, sound or not."""
    return (folder / MANIFEST).is_file()


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint that nobody needs any more."""
    (folder / MANIFEST).unlink(missing_ok=True)
    _tidy(folder)


def save_checkpoint(
    folder: Path,
    state: EngineState,
    *,
    extra: Mapping[str, Any],
    identity: Mapping[str, Any],
    tensors: Mapping[str, Tensor] | None = None,
    ranks: Ranks = ALONE,
) -> None:
    """Write everything that `load_checkpoint` gives back, in place of the folder's older checkpoint.

    Weights that are not finite are refused, so that the older checkpoint outlives a run that diverges.

    On several ranks all call it, each with its own snapshot, for a folder that all of them see. What one of them cannot
    do fails on all.

    Args:
        extra: data of the caller's own, as JSON can hold it; floats come back exactly, infinite ones and NaN too.
        identity: describes the run to which the checkpoint belongs; `load_checkpoint` compares it.
        tensors: of the caller's own.
    """
    content = {"identity": _plain("identity", identity), "extra": _plain("extra", extra)}
    name = ranks.broadcast(f"checkpoint-{state.round}-{secrets.token_hex(6)}")
    try:
        with _agreed(ranks, folder):
            _check_finite(state)
            written = _write_tensors(folder, name, _tensors(state, tensors or {}, ranks), ranks)
        parts = ranks.all_gather((written, state.shard, state.steps))
        with _agreed(ranks, folder):
            if ranks.first:
                _write_manifest(folder, {**content, **_described(state, parts)})
    finally:
        if ranks.first:
            _tidy(folder)


@contextmanager
def _agreed(ranks: Ranks, folder: Path) -> Iterator[None]:
    """Turn a full disk into words, and let what fails on one rank fail on all of them."""
    failure: NotWritten | TrainingDiverged | None = None
    try:
        yield
    except (NotWritten, TrainingDiverged) as error:
        failure = error
    except OSError as error:
        kept_one = "; the older checkpoint is still there" if has_checkpoint(folder) else ""
        remedy = f"Free some space, or give a folder that can be written{kept_one}."
        failure = NotWritten(f"{folder}: the checkpoint cannot be written ({_reason(error)}). {remedy}")
        failure.__cause__ = error
    failures = [one for one in ranks.all_gather(failure) if one is not None]
    if failures:
        raise failure or failures[0]


def _write_tensors(folder: Path, name: str, tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, str] | None:
    """Write a rank's file; return its name and checksum, or nothing where there was nothing to write."""
    if not tensors:
        return None
    place = folder / (f"{name}.safetensors" if ranks.size == 1 else f"{name}-rank{ranks.rank}.safetensors")
    replace_file(place, lambda path: write_tensors(path, tensors))
    return {"file": place.name, "sha256": _sha256(place)}


def _write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    for part in content.get("parts", ()):
        if not (folder / part["file"]).is_file():
            problem = f"a rank wrote {part['file']} to another disk than the first one's"
            raise NotWritten(f"{folder}: {problem}. Give a folder that all machines see.")
    manifest = {"format": FORMAT, "sha256": _sha256_of(content), "content": content}
    replace_file(folder / MANIFEST, lambda path: path.write_text(json.dumps(manifest)))


Part = tuple[dict[str, str] | None, tuple[int, ...] | None, tuple[tuple[int, ...], ...]]  # file, devices, steps


def _described(state: EngineState, parts: Sequence[Part]) -> dict[str, Any]:
    """Return what a manifest says of the files that all ranks wrote."""
    (first, mine, _), described = parts[0], _state(state)
    if mine is None:
        return {"state": described, "tensors": first}
    steps: list[Sequence[int]] = []
    for n, own in enumerate(state.steps):
        counted = {k: count for _, whose, theirs in parts for k, count in zip(whose or (), theirs[n], strict=False)}
        steps.append(own if len(own) == 1 else [counted[k] for k in sorted(counted)])
    described["steps"] = steps
    files = [{**written, "devices": devices} for written, devices, _ in parts if written is not None]
    return {"state": described, "tensors": first, "parts": files}


def read_extra(folder: Path, *, identity: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what the caller of `save_checkpoint` added, without reading any tensors."""
    extra: Mapping[str, Any] = _content(folder, identity)["extra"]
    return extra


def load_checkpoint(folder: Path, *, identity: Mapping[str, Any], devices: Sequence[int] | None = None) -> Checkpoint:
    """Return the folder's checkpoint, if it is sound and belongs to the run that `identity` describes.

    Args:
        devices: those of this rank, where there are several: only their copies are kept in memory.
    """
    content = _content(folder, identity)
    try:
        # Of a rank without devices, copies that are nobody's: there are two rows at least (`EngineState.shard`).
        rows = None if devices is None else [*devices, *[0] * (2 - len(devices))]
        found = _read_parts(folder, content, rows)
        mine = None if devices is None else tuple(devices)
        state = _state_from(content["state"], found, rows, mine)
        return Checkpoint(state, content["extra"], _group(found, "extra"), _group(found, "random"))
    except (KeyError, TypeError, ValueError) as error:
        raise _lacking(folder, error) from error


def _read_parts(folder: Path, content: Mapping[str, Any], rows: Sequence[int] | None) -> dict[str, Tensor]:
    """Return the tensors of all files, with the copies of the devices `rows`, by default of all.

    Files are mapped into memory, so that copies of other devices are not kept there.
    """
    first = content["tensors"]["file"]
    found = _read_tensors(folder / Path(first).name, content["tensors"]["sha256"])
    wanted = range(len(content["state"]["cuts"])) if rows is None else rows
    copies: dict[str, dict[int, Tensor]] = {}
    for part in content.get("parts", ()):
        here = {device: row for row, device in enumerate(part["devices"]) if device in wanted}
        if here:
            path = folder / Path(part["file"]).name
            tensors = found if part["file"] == first else _read_tensors(path, part["sha256"])
            for name, held in _group(tensors, OWN).items():
                copies.setdefault(name, {}).update({device: held[row] for device, row in here.items()})
    if rows is not None:  # of what one process wrote
        picked = [name for name, tensor in found.items() if name.startswith("layer.") and len(tensor) > 1]
        found |= {name: found[name][list(rows)] for name in picked}
    return found | {name: torch.stack([of[device] for device in wanted]) for name, of in copies.items()}


def _content(folder: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest of a checkpoint of this run."""
    content = _read_manifest(folder / MANIFEST)
    try:
        _check_identity(content["identity"], _plain("identity", identity), folder / MANIFEST)
        content["extra"]
    except (KeyError, TypeError) as error:
        raise _lacking(folder, error) from error
    return content


def _lacking(folder: Path, error: Exception) -> InvalidInput:
    problem = f"lacks what a checkpoint holds ({type(error).__name__}: {error})"
    return InvalidInput("checkpoint", problem, ANEW, source=str(folder / MANIFEST))


def _tensors(state: EngineState, extra: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Return all tensors that this rank writes under one name each, in plain memory."""
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
    # safetensors refuses tensors that share memory, as the caller's own may.
    own = {f"extra.{name}": value.detach().cpu().contiguous().clone() for name, value in extra.items()}
    return {**random, **layers, **own}


def _state(state: EngineState) -> dict[str, Any]:
    plan = state.plan
    return {
        "cuts": plan.cuts,
        "interval": plan.interval,
        "layer_intervals": {str(layer): interval for layer, interval in plan.layer_intervals.items()},
        "round": state.round,
        "planned_at": state.planned_at,
        "ages": state.ages,
        "steps": state.steps,
        "present": state.present,
    }


def _state_from(
    data: Mapping[str, Any], tensors: Mapping[str, Tensor], rows: Sequence[int] | None, mine: tuple[int, ...] | None
) -> EngineState:
    intervals = {int(layer): interval for layer, interval in data["layer_intervals"].items()}
    return EngineState(
        Decision(tuple(data["cuts"]), data["interval"], intervals),
        data["round"],
        data["planned_at"],
        tuple(data["ages"]),
        tuple(
            tuple(steps) if rows is None or len(steps) == 1 else tuple(steps[k] for k in rows)
            for steps in data["steps"]
        ),
        tuple(_group(tensors, f"layer.{number}") for number in range(1, len(data["steps"]) + 1)),
        tuple(data["present"]),
        mine,
    )


def _group(tensors: Mapping[str, Tensor], group: str) -> dict[str, Tensor]:
    prefix = f"{group}."
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _check_finite(state: EngineState) -> None:
    """Refuse weights that are no numbers: a round's loss is that before its update, so it does not show them."""
    for number, layer in enumerate(state.tensors, start=1):
        for name, tensor in layer.items():
            # Parameters only: a buffer may hold infinities on purpose, as masks of attention do.
            if name.startswith("parameters.") and not torch.isfinite(tensor).all():
                where = f"round {state.round}: {name.removeprefix('parameters.')} of layer {number}"
                remedy = "Lower the learning rate, or use a model with normalisation"
                raise TrainingDiverged(f"{where} has weights that are not finite. {remedy}. No checkpoint was written.")


def _plain(field: str, value: Any) -> Any:
    """Return `value` as JSON gives it back, or say which part of it JSON cannot hold."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise InvalidInput(field, f"has the key {key!r}", "Give texts as keys: JSON has no others")
        return {key: _plain(f"{field}.{key}", part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(f"{field}[{k}]", part) for k, part in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    remedy = "Give numbers, texts, lists and mappings of them; tensors go into `tensors`"
    raise InvalidInput(field, f"is a {type(value).__name__}", remedy)


def _read_manifest(path: Path) -> dict[str, Any]:
    source = str(path)
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        remedy = "Give the folder of a run that wrote one, or begin anew"
        raise InvalidInput("checkpoint", "there is none here", remedy, source=source) from None
    except OSError as error:
        raise InvalidInput("checkpoint", f"cannot be read ({_reason(error)})", ANEW, source=source) from error
    except ValueError as error:
        raise InvalidInput("checkpoint", f"is damaged: not valid JSON ({error})", ANEW, source=source) from None
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if not str(version).startswith("adaptsfl-checkpoint-"):
        remedy = "Give the folder of a training run"
        raise InvalidInput("checkpoint", "is a file of another program", remedy, source=source)
    if version != FORMAT:
        remedy = "Go on with the version of AdaptSFL that wrote it, or begin anew"
        raise InvalidInput("format", f"is {version!r}, this version reads {FORMAT!r}", remedy, source=source)
    content: dict[str, Any] = manifest.get("content")
    if _sha256_of(content) != manifest.get("sha256"):
        raise InvalidInput("checkpoint", "is damaged: its checksum is another", ANEW, source=source)
    return content


def _read_tensors(path: Path, checksum: str) -> dict[str, Tensor]:
    source = str(path)
    try:
        found = _sha256(path)
        if found != checksum:
            raise InvalidInput("checkpoint", "is damaged: its checksum is another", ANEW, source=source)
        return load_file(path)
    except FileNotFoundError:
        problem = f"is gone, but {MANIFEST} names it"
        raise InvalidInput("checkpoint", problem, ANEW, source=source) from None
    except (OSError, SafetensorError) as error:
        raise InvalidInput("checkpoint", f"cannot be read ({_reason(error)})", ANEW, source=source) from error


def _differences(field: str, stored: Any, given: Any) -> Iterator[tuple[str, str, str]]:
    """Yield where two identities differ, by their keys down to a single value, and both values there."""
    if isinstance(stored, dict) and isinstance(given, dict):
        for key in {**stored, **given}:
            if key in stored and key in given:
                yield from _differences(f"{field}.{key}", stored[key], given[key])
            else:
                was, now = (_shown(side[key]) if key in side else "absent" for side in (stored, given))
                yield f"{field}.{key}", was, now
    elif isinstance(stored, list) and isinstance(given, list) and len(stored) == len(given):
        for k, (old, new) in enumerate(zip(stored, given, strict=True)):
            yield from _differences(f"{field}[{k}]", old, new)
    elif json.dumps(stored) != json.dumps(given):  # by text, so that NaN is equal to itself
        yield field, _shown(stored), _shown(given)


def _check_identity(stored: Any, given: Any, source: Path) -> None:
    """Refuse a checkpoint of another run."""
    for field, was, now in _differences("identity", stored, given):
        remedy = "Go on with the same settings, or begin anew in another folder"
        raise InvalidInput(field, f"was {was} when the checkpoint was made, is {now} now", remedy, source=str(source))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _tidy(folder: Path) -> None:
    """Remove tensors that no manifest names, and what a killed program left half written."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # rather keep too much than stop training
        path = folder / MANIFEST
        content = json.loads(path.read_bytes())["content"] if path.exists() else {}
        used = {part["file"] for part in (content.get("tensors", {}), *content.get("parts", ())) if part}
        for file in _ours(folder):
            if file.name not in used:
                file.unlink(missing_ok=True)


def _ours(folder: Path) -> Iterator[Path]:
    yield from folder.glob("checkpoint-*.safetensors")
    yield from folder.glob(f"{TEMPORARY}checkpoint*")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sha256_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
