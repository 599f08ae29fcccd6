"""The figures of an experiment."""

import dataclasses
import sys

import pytest

from adaptsfl.errors import InvalidInput
from adaptsfl.report.figures import write_figures

NAMES = ("accuracy-time", "accuracy-rounds", "phases", "plan")


@pytest.fixture
def _matplotlib() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'adaptsfl[plots]'")


@pytest.mark.usefixtures("_matplotlib")
def test_every_figure_as_png_and_svg(runs, tmp_path):
    files = write_figures(runs, tmp_path / "figures")
    assert [file.name for file in files] == [f"{name}{suffix}" for name in NAMES for suffix in (".png", ".svg")]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files if file.suffix == ".png")
    svgs = {file.stem: file.read_text() for file in files if file.suffix == ".svg"}
    for name, words in {
        "accuracy-time": ("virtual time", "test accuracy", "AdaptSFL", "RMA+RMS"),
        "accuracy-rounds": ("rounds", "AdaptSFL"),
        "phases": ("a2 activation upload", "b1 model upload", "AdaptSFL"),
        "plan": ("interval I", "deepest cut", "AdaptSFL"),
    }.items():
        for word in words:
            assert word in svgs[name], (name, word)
    assert "#0072b2" in svgs["accuracy-time"]
    assert "#0072b2" in svgs["plan"]


@pytest.mark.usefixtures("_matplotlib")
def test_odd_runs(runs, tmp_path):
    """Titles that matplotlib would read as formulas or hide, no averaging at all, nothing recorded."""
    blocks = tuple(dataclasses.replace(block, interval=None) for block in runs[0].blocks)
    odd = [
        dataclasses.replace(runs[0], title="$never^", policy="a", blocks=blocks),
        dataclasses.replace(runs[0], title="_hidden", policy="b", blocks=()),
    ]
    write_figures(odd, tmp_path)
    assert "$never^" in (tmp_path / "accuracy-time.svg").read_text()
    assert "_hidden" in (tmp_path / "phases.svg").read_text()


@pytest.mark.usefixtures("_matplotlib")
def test_a_folder_that_cannot_be_written(runs, tmp_path):
    (tmp_path / "figures").write_text("a file")
    with pytest.raises(InvalidInput, match="cannot be written"):
        write_figures(runs, tmp_path / "figures")


def test_without_matplotlib(runs, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InvalidInput, match=r"need matplotlib\. Install it: pip install 'adaptsfl\[plots\]'"):
        write_figures(runs, tmp_path)
