"""The fed server's files: the last versions of the averaged layers, and the complete model at the end."""

import json
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from adaptsfl.deploy.layers_file import LayerStates, Template, by_layer, named
from adaptsfl.deploy.moments_file import NormMoments
from adaptsfl.deploy.parties.fed.block import ClosedBlock
from adaptsfl.deploy.terms import Terms
from adaptsfl.errors import InvalidInput, first_line
from adaptsfl.files import about_tensors, replace_file, write_tensors, writing
from adaptsfl.training.statistics import running_buffers

KEPT_VERSIONS = 2  # the edge server may have stopped before its checkpoint of the last one
MODEL_FILE = "model.safetensors"


class VersionStore:
    """The folder of a fed server."""

    def __init__(self, folder: Path, terms: Terms, template: Template) -> None:
        self.folder, self.terms, self.template = folder, terms, template

    def load(self) -> tuple[dict[int, LayerStates], ClosedBlock | None]:
        """Return the versions of an earlier process, and the block that produced the last one."""
        found: dict[int, LayerStates] = {}
        closed = None
        for file in sorted(self.folder.glob("version-*.safetensors"), key=_version_of)[-KEPT_VERSIONS:]:
            try:
                found[_version_of(file)] = by_layer(load_file(file))
                about = about_tensors(file)
            except (OSError, SafetensorError, ValueError) as error:
                problem = f"cannot be read ({first_line(error)})"
                remedy = "Restore it from a copy, or begin anew in an empty folder"
                raise InvalidInput("version", problem, remedy, source=str(file)) from None
            if about.get("terms") != self.terms.to_json():
                problem = "is of a run with another recipe"
                raise InvalidInput("version", problem, "Give a folder of its own to every run", source=str(file))
            apart = tuple(json.loads(about.get("divergence", "[]")))
            closed = ClosedBlock(int(about["attempt"]), _version_of(file), apart)
        return found, closed

    def save(self, closed: ClosedBlock, states: LayerStates) -> None:
        """Write the version that a block produced, and delete versions that are no longer needed."""
        place = self.folder / f"version-{closed.version}.safetensors"
        about = {
            "terms": self.terms.to_json(),
            "attempt": str(closed.attempt),
            "divergence": json.dumps(closed.divergence),
        }
        with writing(place, "Free some space: the versions before it are still there"):
            replace_file(place, lambda path: write_tensors(path, named(states), about))
        for file in sorted(self.folder.glob("version-*.safetensors"), key=_version_of):
            if not closed.version - KEPT_VERSIONS < _version_of(file) <= closed.version:
                file.unlink(missing_ok=True)

    def write_model(self, states: LayerStates, merged: NormMoments) -> None:
        """Write the complete model; batch-norm's statistics are the layers' own, or those of merged moments."""
        pieces = []
        for number, state in states.items():
            piece = self.template.layer(number, state).piece
            piece.load_state_dict(running_buffers(piece, number, merged), strict=False)
            pieces.append(piece.state_dict())
        whole: dict[str, Tensor] = self.template.model.merge_state(*pieces)
        tensors = {name: tensor.detach().contiguous().clone() for name, tensor in whole.items()}
        place = self.folder / MODEL_FILE
        with writing(place, "Free some space: all layers are still there"):
            replace_file(place, lambda path: write_tensors(path, tensors))


def _version_of(file: Path) -> int:
    number = file.stem.removeprefix("version-")
    return int(number) if number.isdigit() else -1
