"""Fingerprint the user's own code: one module, and all other modules of the user that it imports.

Results belong to the code that produced them: a model whose `forward` was edited is a different model with the same
name. Installed packages are represented by their version. AdaptSFL's own version is not included here: callers store it
next to the fingerprint.
"""

import ast
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

INSTALLED = {"site-packages", "dist-packages"}
STANDARD = Path(os.__file__).parent  # folder of the standard library
SCRIPT = {"__mp_main__": "__main__"}  # name of a script's module in the processes that it starts


@dataclass(frozen=True)
class Loaded:
    """A module of the user's own and its source when we first read it.

    If a recipe names the module, we read the source right after the import, so that editing the file later does not
    change the fingerprint of the code that this process runs. If the module was imported earlier, the loaded source is
    unknown, and we use the file's content at the first read.
    """

    module: ModuleType
    spec: ModuleSpec | None
    source: bytes | None


_loaded: dict[str, Loaded] = {}


def fingerprint(module: str) -> str | None:
    """Return the fingerprint of the code of a module that has been imported, and of what it uses.

    Return None if some of the source cannot be read, because it is compiled or was typed at a prompt.
    """
    sources = dict(_sources(module))
    whole = sha256()
    for name, source in sorted(sources.items()):
        if source is None:
            return None
        whole.update(f"{name} {len(source)}\n".encode() + source)
    return whole.hexdigest()[:16]


def _sources(first: str) -> Iterator[tuple[str, bytes | None]]:
    """Yield the name and source of a module and of every module that it uses; for installed packages, the version."""
    waiting, known = [first], set()
    while waiting:
        name = waiting.pop()
        if name in known:
            continue
        known.add(name)
        spec = _spec(name)
        if spec is None and name not in sys.modules:
            continue  # not a module: `name` in `from package import name`
        match _kind(name, spec):
            case "own":
                source = _source(name, spec)
                yield SCRIPT.get(name, name), source
                waiting += [*_packages(name), *_imports(source or b"", name, spec), *_in_globals(name)]
            case "installed":
                package = name.partition(".")[0]
                yield package, _version(package).encode()


def _spec(name: str) -> ModuleSpec | None:
    """Return the spec of a module, without importing anything."""
    if name in sys.modules:
        return getattr(sys.modules[name], "__spec__", None)
    package = name.rpartition(".")[0]
    with suppress(ImportError, ValueError):
        if not package:
            return importlib.util.find_spec(name)
        above = _spec(package)
        if above is not None and above.submodule_search_locations is not None:
            return PathFinder.find_spec(name, above.submodule_search_locations)
    return None


def _kind(name: str, spec: ModuleSpec | None) -> str:
    """Return "own" (the user's code), "installed", or "known" (identified by AdaptSFL's or Python's version)."""
    package = name.partition(".")[0]
    if package == "adaptsfl":
        return "known"
    file = getattr(sys.modules.get(name), "__file__", None) or (spec.origin if spec is not None else None)
    inside = list((spec.submodule_search_locations if spec is not None else None) or ())  # of a package without a file
    places = [Path(place) for place in ([file] if file else inside)]
    if any(INSTALLED & set(place.parts) for place in places):
        return "installed"
    standard = all(place.is_relative_to(STANDARD) or str(place) in ("built-in", "frozen") for place in places)
    return "known" if standard and package in sys.stdlib_module_names else "own"


@lru_cache(maxsize=1024)
def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # its distribution and import names differ
        return ""


def _source(name: str, spec: ModuleSpec | None) -> bytes | None:
    module = sys.modules.get(name)
    if module is None:  # a function imports it later and was not called yet
        return None if spec is None else _read(name, spec.origin, spec.loader)
    noted = _loaded.get(name)
    if noted is None or noted.module is not module or noted.spec is not spec:  # a reload changes the spec
        source = _read(name, getattr(module, "__file__", None), getattr(module, "__loader__", None))
        noted = _loaded[name] = Loaded(module, spec, source)
    return noted.source


def _read(name: str, file: str | None, loader: object) -> bytes | None:
    if file is not None and file.endswith(".py"):
        with suppress(OSError):
            return Path(file).read_bytes()
    with suppress(Exception):  # an archive, or a custom loader, which may raise anything
        text = loader.get_source(name)  # type: ignore[attr-defined]
        return None if text is None else str(text).encode()
    return None


def _packages(name: str) -> list[str]:
    """Return the parent packages of a module, which Python imports before it."""
    parts = name.split(".")
    return [".".join(parts[:k]) for k in range(1, len(parts))]


@lru_cache(maxsize=1024)
def _imported(source: bytes) -> tuple[tuple[int, str, tuple[str, ...]], ...]:
    """Return (level, module, names) of every import in a source, also of those inside functions."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # not the source that was loaded, so its imports are unknown
        return ()
    found: list[tuple[int, str, tuple[str, ...]]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(0, alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.level, node.module or "", tuple(alias.name for alias in node.names)))
    return tuple(found)


def _imports(source: bytes, name: str, spec: ModuleSpec | None) -> Iterator[str]:
    """Yield the modules that a module imports, and possible ones: `name` in `from package import name`."""
    is_package = spec is not None and spec.submodule_search_locations is not None
    package = name.split(".") if is_package else name.split(".")[:-1]
    if name in SCRIPT.values() and spec is not None:  # run by python -m
        package = spec.parent.split(".") if spec.parent else []
    for level, module, names in _imported(source):
        above = package[: len(package) - level + 1] if level else []
        origin = ".".join([*above, module] if module else above)
        yield origin
        yield from (f"{origin}.{each}" for each in names)


def _in_globals(name: str) -> list[str]:
    """Return the modules among a module's globals, and the modules that define its other globals."""
    found = []
    for key, value in list(vars(sys.modules[name]).items()) if name in sys.modules else ():
        if key.startswith("__") or not key.isidentifier():
            continue  # Python's own, or a test runner's
        if value is sys.modules.get(f"{name}.{key}"):
            continue  # a submodule, which any import of it sets here: this module's own imports are found elsewhere
        with suppress(Exception):  # reading an attribute of an object may raise anything
            where = value.__name__ if isinstance(value, ModuleType) else value.__module__
            if isinstance(where, str) and where in sys.modules:
                found.append(where)
    return found
