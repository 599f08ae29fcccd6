"""The manifest of a checkpoint: a JSON file that says to which run it belongs, and names the files of its tensors.

Every file and the manifest itself have a checksum: damage is detected before anything is used.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from adaptsfl.errors import InvalidInput, NotWritten
from adaptsfl.files import TEMPORARY, replace_file, write_tensors

FORMAT = "adaptsfl-checkpoint-1"  # the number changes when older files become unreadable
MANIFEST = "checkpoint.json"
ANEW = "Begin the run anew in an empty folder, or restore the folder from a copy"


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Replace the manifest atomically."""
    for part in content.get("parts", ()):
        if not (folder / part["file"]).is_file():
            problem = f"a rank wrote {part['file']} to another disk than the first one's"
            raise NotWritten(f"{folder}: {problem}. Give a folder that all machines see.")
    manifest = {"format": FORMAT, "sha256": _sha256_of(content), "content": content}
    replace_file(folder / MANIFEST, lambda path: path.write_text(json.dumps(manifest)))


def read_manifest(folder: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a manifest, if it is undamaged and belongs to the run that `identity` describes."""
    content = _read_content(folder / MANIFEST)
    try:
        for field, was, now in _differences("identity", content["identity"], plain("identity", identity)):
            remedy = "Go on with the same settings, or begin anew in another folder"
            problem = f"was {was} when the checkpoint was made, is {now} now"
            raise InvalidInput(field, problem, remedy, source=str(folder / MANIFEST))
        content["extra"]
    except (KeyError, TypeError) as error:
        raise incomplete(folder, error) from error
    return content


def write_part(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Write a file of tensors; return its entry in the manifest."""
    replace_file(path, lambda temporary: write_tensors(temporary, tensors))
    return {"file": path.name, "sha256": _sha256(path)}


def read_part(folder: Path, part: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the tensors of a file that the manifest names."""
    path = folder / Path(part["file"]).name
    source = str(path)
    try:
        if _sha256(path) != part["sha256"]:
            raise InvalidInput("checkpoint", "is damaged: its checksum is another", ANEW, source=source)
        return load_file(path)
    except FileNotFoundError:
        problem = f"is gone, but {MANIFEST} names it"
        raise InvalidInput("checkpoint", problem, ANEW, source=source) from None
    except (OSError, SafetensorError) as error:
        raise InvalidInput("checkpoint", f"cannot be read ({reason(error)})", ANEW, source=source) from error


def remove_unnamed(folder: Path) -> None:
    """Remove files of tensors that the manifest does not name, and temporary files of a killed program."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # keep leftovers rather than stop training
        path = folder / MANIFEST
        content = json.loads(path.read_bytes())["content"] if path.exists() else {}
        named = {part["file"] for part in (content.get("tensors", {}), *content.get("parts", ())) if part}
        for pattern in ("checkpoint-*.safetensors", f"{TEMPORARY}checkpoint*"):
            for file in folder.glob(pattern):
                if file.name not in named:
                    file.unlink(missing_ok=True)


def plain(field: str, value: Any) -> Any:
    """Return `value` as JSON would restore it, or refuse it and name the part that JSON cannot hold."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise InvalidInput(field, f"has the key {key!r}", "Give texts as keys: JSON has no others")
        return {key: plain(f"{field}.{key}", part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(f"{field}[{k}]", part) for k, part in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    remedy = "Give numbers, texts, lists and mappings of them; tensors go into `tensors`"
    raise InvalidInput(field, f"is a {type(value).__name__}", remedy)


def incomplete(folder: Path, error: Exception) -> InvalidInput:
    """Return the error for a manifest that lacks a key."""
    problem = f"lacks what a checkpoint holds ({type(error).__name__}: {error})"
    return InvalidInput("checkpoint", problem, ANEW, source=str(folder / MANIFEST))


def reason(error: Exception) -> str:
    """Return the reason that a file system error gives."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _read_content(path: Path) -> dict[str, Any]:
    source = str(path)
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        remedy = "Give the folder of a run that wrote one, or begin anew"
        raise InvalidInput("checkpoint", "there is none here", remedy, source=source) from None
    except OSError as error:
        raise InvalidInput("checkpoint", f"cannot be read ({reason(error)})", ANEW, source=source) from error
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
    elif json.dumps(stored) != json.dumps(given):  # compared as text, so that NaN equals NaN
        yield field, _shown(stored), _shown(given)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sha256_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
