"""Small files in the formats that datasets come in."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from adaptsfl.data import images, parquet
from pictures import encoded, random_images

Write = Callable[..., Path]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the user's cache and datasets out of it."""
    monkeypatch.setenv("ADAPTSFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ADAPTSFL_DATA", raising=False)


@pytest.fixture
def write_parquet() -> Write:
    """Write images (n, H, W, 3) and labels in the hub's schema, the images in any format, or given as bytes."""

    def write(path: Path, images, labels, *, format_="WEBP", label="label", image="img", names=None) -> Path:
        content = [row if isinstance(row, bytes | None) else encoded(row, format_) for row in images]
        column = pa.array(
            [{"bytes": row, "path": None} for row in content],
            pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
        )
        table = pa.table({image: column, label: pa.array(list(labels), pa.int64())})
        if names is not None:
            features = {label: {"names": names, "_type": "ClassLabel"}}
            table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path, row_group_size=3)
        return path

    return write


@pytest.fixture
def small_cifar(tmp_path: Path, write_parquet: Write) -> Path:
    """A folder as ADAPTSFL_DATA names it, with a cifar10 of 40 + 10 images."""
    names = [f"class {k}" for k in range(10)]
    root = tmp_path / "datasets"
    write_parquet(root / "cifar10" / "train.parquet", random_images(40), [k % 10 for k in range(40)], names=names)
    write_parquet(root / "cifar10" / "test.parquet", random_images(10, seed=1), range(10), names=names)
    return root


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many images each decoding had."""
    counts: list[int] = []

    def counting(encoded, count, where):
        counts.append(count)
        return images.decode_images(encoded, count, where)

    monkeypatch.setattr(parquet, "decode_images", counting)
    return counts


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """train/ and test/ with the classes cat and dog, 6 and 2 images each."""
    pictures = iter(random_images(16, seed=2))
    for split, count in (("train", 6), ("test", 2)):
        for name in ("cat", "dog"):
            folder = tmp_path / "pictures" / split / name
            folder.mkdir(parents=True)
            for k in range(count):
                (folder / f"{k}.png").write_bytes(encoded(next(pictures), "PNG"))
    return tmp_path / "pictures"
