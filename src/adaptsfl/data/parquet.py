"""Labelled images in parquet files, in the schema of the Hugging Face hub."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from adaptsfl.checks import IntArray
from adaptsfl.data.cache import Decoded
from adaptsfl.data.images import decode_images
from adaptsfl.data.samples import Choice, Samples
from adaptsfl.errors import InvalidInput, first_line

IMAGE_COLUMNS = ("img", "image")


def read_parquet(files: Sequence[Path], label: str) -> Decoded:
    """Decode all rows of the files, in order; `label` names the column with the labels."""
    table = pa.concat_tables([_read_table(file, label, images=True) for file in files])
    return decode_table(table, label, " + ".join(map(str, files)))


def read_parquet_labels(file: Path, label: str) -> Tensor:
    """Return the labels of a file, without reading its images."""
    return _labels(_read_table(file, label, images=False), label, str(file))


def read_parquet_part(files: Sequence[Path], label: str, choose: Choice) -> Decoded:
    """Decode the rows that `choose` selects, given the labels of all rows; no other image stays in memory."""
    source = " + ".join(map(str, files))
    labels = torch.cat([read_parquet_labels(file, label) for file in files])
    rows = choose(labels)
    # Row 0 is decoded first and then dropped: it decides whether images are grey, as when all rows are decoded.
    wanted = np.concatenate([[0], rows])
    inputs = decode_images(
        chain(_encoded(files, label, wanted[:1], source), _encoded(files, label, rows, source)),
        len(wanted),
        lambda k: f"{source}: the image in row {wanted[k]}",
    )
    names = _class_names(pq.read_schema(files[0]), label, int(labels.max()) + 1)
    return Samples(inputs[1:].clone(), labels[torch.from_numpy(rows)]), names


def _encoded(files: Sequence[Path], label: str, rows: IntArray, source: str) -> Iterator[bytes]:
    """Yield the images of these rows; read one row group at a time, and only groups that contain such rows."""
    first = 0
    for file in files:
        with _explained(file), pq.ParquetFile(file) as opened:
            image = _check_schema(opened.schema_arrow, label, str(file))
            for group in range(opened.num_row_groups):
                last = first + opened.metadata.row_group(group).num_rows
                here = rows[(rows >= first) & (rows < last)]
                if len(here):
                    table = opened.read_row_group(group, columns=[image], use_threads=False)
                    encoded = table.column(image).take(here - first).combine_chunks().field("bytes")
                    _check_whole(encoded, f"{image}.bytes", source, here)
                    images = encoded.to_pylist()
                    del table, encoded
                    pa.default_memory_pool().release_unused()  # else Arrow keeps the memory of several groups
                    yield from images
                first = last


def _read_table(file: Path, label: str, *, images: bool) -> Any:
    """Return the labels, and the images if `images`; raise unless the file has both columns."""
    with _explained(file):
        image = _check_schema(pq.read_schema(file), label, str(file))
        return pq.read_table(file, columns=[image, label] if images else [label])


@contextmanager
def _explained(file: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        problem = f"{file} cannot be read as parquet: {first_line(error)}"
        raise InvalidInput("data.path", problem, "Get the file again") from error


def decode_table(table: Any, label: str, source: str) -> Decoded:
    """Decode the images of an Arrow table: a column img or image (struct with `bytes`), a column of integer labels."""
    image = _check_schema(table.schema, label, source)
    labels = _labels(table, label, source)
    encoded = table.column(image).combine_chunks().field("bytes")
    _check_whole(encoded, f"{image}.bytes", source)
    inputs = decode_images(encoded.to_pylist(), table.num_rows, lambda k: f"{source}: the image in row {k}")
    return Samples(inputs, labels), _class_names(table.schema, label, int(labels.max()) + 1)


def _labels(table: Any, label: str, source: str) -> Tensor:
    if table.num_rows == 0:
        raise InvalidInput("data.path", f"{source} has no rows", "Get the file again")
    _check_whole(table.column(label), label, source)
    return torch.from_numpy(table.column(label).to_numpy().astype("int64"))


def _check_whole(values: Any, column: str, source: str, rows: IntArray | None = None) -> None:
    """Raise if a column has null values; `rows` are the numbers of its rows, by default 0, 1, …."""
    if values.null_count:
        row = values.is_null().to_pylist().index(True)
        problem = f"{source}: row {row if rows is None else rows[row]} has no {column}"
        raise InvalidInput("data.path", problem, "Give a file that holds every image and label itself")


def _check_schema(schema: Any, label: str, source: str) -> str:
    """Return the name of the image column; raise with the columns of the file if they do not fit."""
    image = next((name for name in IMAGE_COLUMNS if name in schema.names), None)
    fits = image is not None and label in schema.names and pa.types.is_integer(schema.field(label).type)
    if fits:
        kind = schema.field(image).type
        fits = pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0
        fits = fits and (
            pa.types.is_binary(kind.field("bytes").type) or pa.types.is_large_binary(kind.field("bytes").type)
        )
    if image is None or not fits:
        columns = ", ".join(f"{field.name} ({field.type})" for field in schema)
        raise InvalidInput(
            "data.path",
            f"{source} has the wrong columns: {columns}",
            f"Give a file with img or image (struct with bytes) and {label} (integer), as on the Hugging Face hub",
        )
    return image


def _class_names(schema: Any, label: str, count: int) -> tuple[str, ...]:
    """Return the names that the hub's metadata gives the classes, or their numbers if there is no metadata."""
    try:
        features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
        return tuple(str(name) for name in features[label]["names"])
    except (KeyError, TypeError, ValueError):
        return tuple(str(k) for k in range(count))
