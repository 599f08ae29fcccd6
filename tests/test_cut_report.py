"""The figure of every cut's cost."""

import sys
from pathlib import Path

import pytest

from adaptsfl import paper_costs
from adaptsfl.errors import InvalidInput
from adaptsfl.report.cut_report import plot_cuts

COSTS = paper_costs.vgg16(10, 16)


@pytest.fixture
def _matplotlib() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'adaptsfl[plots]'")


@pytest.mark.usefixtures("_matplotlib")
def test_png_and_svg(tmp_path: Path) -> None:
    png = plot_cuts(COSTS, tmp_path / "cuts.png")
    assert png.read_bytes().startswith(b"\x89PNG")
    svg = plot_cuts(COSTS, tmp_path / "cuts.svg", title="VGG-16").read_text()
    for text in ("VGG-16", "conv1_1", "fc3", "device's work", "traffic each way", "activations, per sample"):
        assert text in svg, text


@pytest.mark.usefixtures("_matplotlib")
def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"cannot be written \(No such file or directory\)"):
        plot_cuts(COSTS, tmp_path / "none" / "cuts.png")


def test_another_suffix() -> None:
    with pytest.raises(InvalidInput, match=r"plot: is 'cuts\.bmp'\. Give a file name that ends in \.png or \.svg"):
        plot_cuts(COSTS, "cuts.bmp")


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InvalidInput, match=r"need matplotlib\. Install it: pip install 'adaptsfl\[plots\]'"):
        plot_cuts(COSTS, "cuts.png")
