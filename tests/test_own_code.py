"""Fingerprints of the user's own code: another one where anything that it uses of theirs was edited."""

import importlib
import py_compile
import sys
from pathlib import Path

import pytest

from adaptsfl import factories, own_code

FILES = {
    "ownpkg/__init__.py": "STARTED = True\n",
    "ownpkg/main.py": (
        "import json\nimport numpy as np\n"
        "from . import near\nfrom .values import WIDTH\nfrom .sub.deep import layer\n\n"
        "def make():\n    import ownlater\n    from ownpkg.rarely import option\n    return ownlater, option\n"
    ),
    "ownpkg/near.py": "def step():\n    return 1\n",
    "ownpkg/values.py": "WIDTH = 3\n",
    "ownpkg/sub/__init__.py": "",
    "ownpkg/sub/deep.py": "from ..values import WIDTH\n\ndef layer():\n    return WIDTH\n",
    "ownpkg/rarely.py": "option = 1\n",
    "ownpkg/unused.py": "nothing = 1\n",
    "ownlater.py": "late = 1\n",
}


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    yield tmp_path
    forget()


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("ownpkg", "ownlater")]:
        del sys.modules[name]
    importlib.invalidate_caches()


def code_now() -> str | None:
    """As a new process sees it."""
    forget()
    return factories.code_of("model", "ownpkg.main:make")


@pytest.mark.parametrize("name", [name for name in FILES if name != "ownpkg/unused.py"])
def test_whatever_it_uses_counts(place: Path, name: str) -> None:
    """Packages that it is in, relative imports, values without a home, and what only a function imports."""
    before = code_now()
    assert before == code_now()
    (place / name).write_text(FILES[name] + "# edited\n")
    assert before != code_now() is not None


def test_what_it_does_not_use_does_not_count(place: Path) -> None:
    before = code_now()
    (place / "ownpkg/unused.py").write_text("nothing = 2\n")
    assert code_now() == before


def test_what_others_import_of_its_package_does_not_count(place: Path) -> None:
    before = code_now()
    with factories.importing_from_here():
        importlib.import_module("ownpkg.unused")
    assert factories.code_of("model", "ownpkg.main:make") == before


def test_what_is_imported_later_is_the_same_code(place: Path) -> None:
    before = code_now()
    with factories.importing_from_here():
        factories.find("model", "ownpkg.main:make", "")()
    assert "ownlater" in sys.modules
    assert factories.code_of("model", "ownpkg.main:make") == before


def test_installed_packages_count_by_their_version(place: Path, monkeypatch) -> None:
    before = code_now()
    monkeypatch.setattr(own_code, "_version", lambda package: f"{package} 9")
    assert code_now() != before


def test_the_code_that_was_loaded_counts_not_the_file(place: Path) -> None:
    before = code_now()
    (place / "ownpkg/near.py").write_text("def step():\n    return 22\n")
    assert factories.code_of("model", "ownpkg.main:make") == before
    importlib.reload(sys.modules["ownpkg.near"])
    assert factories.code_of("model", "ownpkg.main:make") != before


def test_compiled_code_has_no_name(place: Path) -> None:
    source = place / "ownlater.py"
    py_compile.compile(str(source), cfile=str(place / "ownlater.pyc"))
    source.unlink()
    assert code_now() is None


def test_a_file_may_have_the_name_of_a_standard_module(place: Path) -> None:
    (place / "ownpkg/main.py").write_text("from . import profile\n\ndef make():\n    return 1\n")
    (place / "ownpkg/profile.py").write_text("a = 1\n")
    before = code_now()
    (place / "ownpkg/profile.py").write_text("a = 2 + 2\n")
    assert code_now() != before


def test_names_without_a_factory_are_ours(place: Path) -> None:
    assert factories.code_of("model", "vgg_digits") == ""
