"""The check that every cut of a model is the model, shared by the zoo's and the third-party tests."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from adaptsfl.models import SplitModel

EveryCut = Callable[[SplitModel, Tensor], None]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Run small tensors on one thread: more would wait for each other, most of all on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture
def every_cut() -> EveryCut:
    """Assert that device and server, exchanging one tensor each way, do exactly what the unsplit model does."""
    return _check


def _check(model: SplitModel, x: Tensor) -> None:
    start = {key: value.clone() for key, value in model.module.state_dict().items()}
    for training in (True, False):
        expected = _results(model.module, _unsplit(model.module, training), x, start)
        for cut in range(1, model.layers + 1):
            assert {**model.client(cut).state_dict(), **model.server(cut).state_dict()}.keys() <= start.keys()
            shared = _results(model.module, _at_cut(model.client(cut), model.server(cut), training), x, start)
            copied = _results_of_copies(model, cut, training, x, start)
            for how, found in (("shared", shared), ("copied", copied)):
                assert found.keys() == expected.keys()
                different = [key for key in expected if not torch.equal(found[key], expected[key])]
                assert not different, f"cut {cut}, {how}, training={training}: {different}"


def _unsplit(module: nn.Module, training: bool) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        module.train(training)
        output = module(x)
        output = output if isinstance(output, Tensor) else output.logits
        (output * _like(output)).sum().backward()
        return output

    return step


def _at_cut(client: nn.Module, server: nn.Module, training: bool) -> Callable[[Tensor], Tensor]:
    client.train(training)
    server.train(training)

    def step(x: Tensor) -> Tensor:
        activations = client(x)
        received = activations.detach().clone().requires_grad_()
        output = server(received)
        # Not received.grad: autograd lays that out like the leaf, and sums over another layout round differently.
        tensors = [received, *server.parameters()]
        gradients = torch.autograd.grad((output * _like(output)).sum(), tensors, allow_unused=True)
        for tensor, gradient in zip(tensors[1:], gradients[1:], strict=True):
            tensor.grad = gradient
        activations.backward(gradients[0])
        return output

    return step


def _results(
    module: nn.Module, step: Callable[[Tensor], Tensor], x: Tensor, start: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Run one step from the same state and the same seed; return output, gradients and the state it leaves."""
    module.load_state_dict(start)
    module.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_(x.is_floating_point())
    torch.manual_seed(7)
    results = {"output": step(x).detach()}
    results |= {f"state {key}": value.clone() for key, value in module.state_dict().items()}
    for name, parameter in [("input", x), *module.named_parameters()]:
        if parameter.grad is not None:
            results[f"gradient of {name}"] = parameter.grad.clone()
    return results


def _results_of_copies(
    model: SplitModel, cut: int, training: bool, x: Tensor, start: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Do the same with pieces that share no memory with the model nor with each other, and merge their states."""
    model.module.load_state_dict(start)
    model.module.zero_grad(set_to_none=True)
    client, server = copy.deepcopy(model.client(cut)), copy.deepcopy(model.server(cut))
    x = x.clone().requires_grad_(x.is_floating_point())
    torch.manual_seed(7)
    results = {"output": _at_cut(client, server, training)(x).detach()}
    assert all(torch.equal(value, start[key]) for key, value in model.module.state_dict().items())
    results |= {f"state {k}": v for k, v in model.merge_state(client.state_dict(), server.state_dict()).items()}
    own = {"input": x, **dict(client.named_parameters()), **dict(server.named_parameters())}
    for name in ("input", *dict(model.module.named_parameters())):
        gradient = own[name].grad if name in own else None
        if gradient is not None:
            results[f"gradient of {name}"] = gradient
    return results


def _like(output: Tensor) -> Tensor:
    return torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
