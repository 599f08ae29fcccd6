"""Models by name, by the user's own factory, and what is said when neither works."""

from pathlib import Path

import pytest
import torch
from torch import nn

from adaptsfl.errors import InvalidInput
from adaptsfl.models import ZOO, build

FACTORIES = """
import torch
from torch import nn

def net(hidden=4):
    return nn.Sequential(nn.Linear(3, hidden), nn.Linear(hidden, 2))

def with_example():
    return net(), torch.zeros(1, 3)

def broken():
    raise RuntimeError("no weights here\\nmore")

def number():
    return 3
"""


@pytest.fixture(autouse=True)
def _own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_models_for_build.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)  # factories are found from the working directory


@pytest.mark.parametrize("name", list(ZOO))
def test_every_zoo_model_takes_its_example(name: str) -> None:
    built = build(name, width=0.25)
    assert built.example_input is not None
    output = built.module.eval()(built.example_input)
    assert output.shape[-1] == (256 if name == "gpt" else 10)


def test_examples_follow_the_options() -> None:
    vit, gpt = build("vit", width=0.25, image_size=16), build("gpt", width=0.25, context=8)
    assert vit.example_input is not None
    assert vit.example_input.shape == (1, 3, 16, 16)
    assert gpt.example_input is not None
    assert gpt.example_input.shape == (1, 8)


@pytest.mark.parametrize("name", ["vgg16", "resnet18", "vgg_digits"])
@pytest.mark.parametrize(("norm", "kind"), [("none", None), ("batch", nn.BatchNorm2d), ("group", nn.GroupNorm)])
def test_normalisation_is_selectable(name: str, norm: str, kind: type[nn.Module] | None) -> None:
    module = build(name, width=0.25, norm=norm).module
    norms = {type(part) for part in module.modules()} & {nn.BatchNorm2d, nn.GroupNorm}
    assert norms == ({kind} if kind else set())


@pytest.mark.parametrize("norm", ["none", "batch", "group"])
@pytest.mark.parametrize("name", ["vgg16", "resnet18"])
def test_signals_keep_their_size_through_the_deep_networks(name: str, norm: str) -> None:
    """Untrained logits neither vanish nor explode, also without normalisation: the networks can begin to learn."""
    torch.manual_seed(0)
    logits = build(name, width=0.25, norm=norm).module(torch.randn(16, 3, 32, 32))
    assert 0.05 < float(logits.detach().std()) < 20


def test_residual_blocks_without_normalisation_begin_as_their_shortcut() -> None:
    module = build("resnet18", width=0.25, norm="none").module
    x = torch.rand(2, 16, 8, 8)
    assert torch.equal(module.get_submodule("block1_1")(x), x)
    assert not torch.equal(build("resnet18", width=0.25, norm="group").module.get_submodule("block1_1")(x), x)


def test_the_width_multiplier_scales_channels_in_steps_of_eight() -> None:
    module = build("vgg16", width=0.3).module
    assert [part.out_channels for part in module.modules() if isinstance(part, nn.Conv2d)][:3] == [16, 16, 40]


def test_on_the_meta_device_nothing_is_allocated() -> None:
    built = build("resnet18", device="meta")
    assert built.example_input is not None
    assert {tensor.device.type for tensor in [*built.module.parameters(), built.example_input]} == {"meta"}


def test_own_factories() -> None:
    assert build("own_models_for_build:net", hidden=5).module[0].out_features == 5  # type: ignore[index,union-attr]
    assert build("own_models_for_build:net").example_input is None
    built = build("own_models_for_build:with_example")
    assert built.example_input is not None
    assert built.example_input.shape == (1, 3)
    assert isinstance(build(lambda: nn.Linear(2, 2)).module, nn.Linear)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "vgg61",
            {},
            r"model: 'vgg61' is unknown\. Did you mean 'vgg16'\? Give one of vgg11, vgg16, resnet18, .*:factory",
        ),
        ("zzz", {}, r"model: 'zzz' is unknown\. Give one of"),
        ("vgg16", {"depth": 3}, r"vgg16 does not take .*'depth'.* It takes classes, width, norm, dropout"),
        ("vgg16", {"norm": "layer"}, r"norm: is 'layer'\. Give 'none', 'batch' or 'group'"),
        ("vgg16", {"width": 0}, "width: is 0"),
        ("vit", {"patch": 5}, "patch: is 5"),
        ("vit", {"patch": 0}, "patch: is 0"),
        ("vit", {"image_size": 32.0}, "image_size: is not a whole number: 32.0"),
        ("vit", {"depth": 0}, "depth: is 0"),
        ("vit", {"classes": "ten"}, "classes: is not a whole number: 'ten'"),
        ("vgg16", {"classes": 0}, "classes: is 0. Give a whole number from 1"),
        ("resnet18", {"classes": 2.5}, "classes: is not a whole number: 2.5"),
        ("vgg_digits", {"dropout": 1}, "dropout: is 1. Give a number from 0 to below 1"),
        ("vgg16", {"dropout": -0.5}, "dropout: is -0.5"),
        ("gpt", {"dropout": "half"}, "dropout: is not a number: 'half'"),
        ("gpt", {"vocabulary": -1}, "vocabulary: is -1"),
        ("gpt", {"context": True}, "context: is not a whole number: True"),
        ("gpt", {"depth": 1.5}, "depth: is not a whole number: 1.5"),
        ("gpt", {"tied": "yes"}, "tied: is 'yes'"),
        ("own_models_for_build:nett", {}, r"model own_models_for_build: 'nett' is unknown\. Did you mean 'net'\?"),
        ("own_models_for_build:broken", {}, "own_models_for_build:broken raised RuntimeError: no weights here"),
        ("own_models_for_build:number", {}, "own_models_for_build:number returned a int"),
        ("no_such_package:net", {}, r"importing 'no_such_package' raised ModuleNotFoundError"),
    ],
)
def test_bad_models(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        build(name, **options)
