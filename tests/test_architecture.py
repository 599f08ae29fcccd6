"""The rules of docs/architecture.md, enforced."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "adaptsfl"


def listed_modules() -> list[str]:
    """The modules that docs/architecture.md lists, in its order, a folder's own __init__ after its files."""
    listing = re.search(r"```\n(.*?)```", (ROOT / "docs" / "architecture.md").read_text(), re.DOTALL).group(1)
    modules, room = [], ""
    for line in listing.splitlines():
        name = line.split()[0]
        if line.startswith("  "):
            modules.append(f"{room}.{name}")
            continue
        if room:
            modules.append(room)
        room = name.rstrip("/") if name.endswith("/") else ""
        if not room:
            modules.append(name)
    return [*modules, room] if room else modules


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> set[str]:
    """Every module or name that a file imports, as a dotted path."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


FILES = sorted(path for path in SOURCE.rglob("*.py") if module_name(path))
ORDER = listed_modules()


def test_every_module_is_listed_and_every_listed_module_exists():
    assert sorted(ORDER) == sorted(module_name(path) for path in FILES)


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_go_up_the_list_only(path):
    own = ORDER.index(module_name(path))
    for name in imports(path):
        if not name.startswith("adaptsfl."):
            continue
        parts = name.split(".")[1:]
        target = next((m for k in range(len(parts), 0, -1) if (m := ".".join(parts[:k])) in ORDER), None)
        if target is None:
            continue  # a name of the package itself, such as __version__
        assert ORDER.index(target) < own, f"{module_name(path)} imports {target}, which is not above it"


def test_the_check_would_notice_a_wrong_import(tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text("from adaptsfl.planner import exact\nimport torch\n")
    assert imports(wrong) == {"adaptsfl.planner.exact", "torch"}


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_torch_is_imported_from_the_models_room_on_only(path):
    if ORDER.index(module_name(path)) < ORDER.index("models.zoo.parts"):
        assert not {name for name in imports(path) if name.startswith("torch")}


def test_planning_does_not_import_torch_or_a_milp_solver():
    code = "import sys, adaptsfl.cli; print([m for m in ('torch', 'scipy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("room", "other"), [("simulation", "deploy"), ("deploy", "simulation"), ("runs", "deploy")])
def test_the_two_worlds_know_the_loop_and_not_each_other(room, other):
    files = [path for path in FILES if module_name(path).split(".")[0] == room]
    assert files
    for path in files:
        assert not {name for name in imports(path) if name.startswith(f"adaptsfl.{other}")}, module_name(path)


@pytest.mark.parametrize("room", ["policies", "decisions", "planner"])
def test_deciding_does_not_import_torch(room):
    code = f"import sys, adaptsfl.{room}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("path", [p for p in FILES if module_name(p) != "planner.milp"], ids=module_name)
def test_only_one_file_imports_the_milp_solver(path):
    assert not {name for name in imports(path) if name.startswith("scipy")}


@pytest.mark.parametrize(
    "path", [p for p in FILES if module_name(p).split(".")[0] not in ("cli", "__main__")], ids=module_name
)
def test_nothing_else_imports_the_command_line(path):
    assert not {name for name in imports(path) if name.startswith("adaptsfl.cli")}
