"""Where a model may be cut, what the pieces hold, and what is said when nothing works."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from adaptsfl.errors import InvalidInput
from adaptsfl.models import SplitModel, build, profile, split


class Net(nn.Module):
    """Layers a, b, c, d of the same shape, called as a test says."""

    def __init__(self, run: Callable[["Net", Tensor], Tensor], layer: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        self.run = run
        make = layer or (lambda: nn.Linear(4, 4))
        self.a, self.b, self.c, self.d = make(), make(), make(), make()

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


X = torch.randn(2, 4)


def test_vgg16_has_16_layers_with_or_without_norm() -> None:
    for norm in ("none", "batch", "group"):
        built = build("vgg16", width=0.125, norm=norm, dropout=0.5)
        assert split(built.module, torch.randn(1, 3, 32, 32)).layers == 16


def test_residual_blocks_stay_whole() -> None:
    model = split(Net(lambda n, x: n.d(n.a(x) + n.c(functional.relu(n.b(n.a(x).relu()))))), X)
    # a is used twice, so the first cut is after it is done; then the shortcut runs along b and c.
    assert model.names == ("a", "d")


def test_resnet_traced_by_fx_has_the_layers_of_the_sequence() -> None:
    """The zoo's ResNet is a sequence; without that hint, tracing it finds the same ten layers."""
    inner = build("resnet18", width=0.125).module

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    x = torch.randn(2, 3, 32, 32)
    direct = split(inner, x)
    assert direct.layers == 10
    assert split(Hidden(), x).names == tuple(f"net.{name}" for name in direct.names)


def test_what_has_no_weights_belongs_to_the_layer_before() -> None:
    model = split(Net(lambda n, x: n.d(n.c(n.b(n.a(x).relu().mul(2)).tanh()))), X)
    assert model.layers == 4
    assert torch.equal(model.pieces[0](X), model.module.a(X).relu().mul(2))


def test_normalisation_over_several_dimensions_is_no_layer() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 1), nn.LayerNorm((4, 2, 2)), nn.Flatten(), nn.Linear(16, 2))
    assert split(module, torch.randn(1, 3, 2, 2)).names == ("0", "3")


def test_a_cut_needs_the_batch_in_front() -> None:
    model = split(Net(lambda n, x: n.d(n.c(n.b(n.a(x)).t().contiguous().t()))), X)
    assert model.names == ("a", "b", "c", "d")
    turned = Net(lambda n, x: n.d(n.c(n.b(n.a(x).unsqueeze(0)).squeeze(0))))
    assert split(turned, X).names == ("a", "b", "c", "d")
    sequence_first = Net(lambda n, x: n.d(n.c(n.b(n.a(x.transpose(0, 1)))).transpose(0, 1)))
    assert split(sequence_first, torch.randn(2, 5, 4)).names == ("a", "d")


def test_whole_numbers_do_not_cross_a_cut() -> None:
    """No gradient comes back through them, and none of the types on the wire holds them."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.table, self.last = nn.Linear(4, 4), nn.Embedding(9, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.table((2 * self.first(x)).clamp(0, 8).long()).mean(1))

    model = split(Table(), X)
    assert model.names == ("first", "table", "last")
    assert [model.client(cut)(X).dtype for cut in (1, 2, 3)] == [torch.float32] * 3


def test_a_tensor_that_is_changed_in_place_is_not_cut_before_the_change() -> None:
    def run(n: Net, x: Tensor) -> Tensor:
        x = n.a(x)
        y = n.b(functional.relu(x, inplace=True))
        return n.d(n.c(y + x))

    model = split(Net(run), X)
    assert model.names == ("a", "c", "d")
    received = model.client(1)(X).detach().requires_grad_()
    model.server(1)(received).sum().backward()  # an in-place change of a leaf would raise
    assert received.grad is not None


def test_a_random_tensor_is_drawn_once() -> None:
    def run(n: Net, x: Tensor) -> Tensor:
        noise = torch.rand(4)
        return n.d(n.c(n.b(n.a(x) * noise) * noise))

    assert split(Net(run), X).names == ("a", "c", "d")


def test_weights_used_twice_keep_the_layers_between_them_together() -> None:
    assert split(Net(lambda n, x: n.d(n.c(n.a(n.b(n.a(x)))))), X).names == ("a", "c", "d")


def test_weights_tied_across_the_model_leave_no_cut() -> None:
    built = build("gpt", width=0.25, depth=1, tied=True)
    with pytest.raises(InvalidInput, match=r"no legal cut: 'tokens\.weight' is used on both sides .* Untie them"):
        split(built.module, torch.zeros(1, 64, dtype=torch.long))


def test_blocks_are_coarser_than_layers() -> None:
    built = build("gpt", width=0.25, depth=2)
    assert built.example_input is not None
    assert split(built.module, built.example_input).layers == 6
    blocks = split(built.module, built.example_input, granularity="block")
    assert blocks.names == ("tokens", "blocks.0", "blocks.1", "head")
    nested = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4)))
    assert split(nested, X).names == ("0.0", "0.1", "1")
    assert split(nested, X, granularity="block").names == ("0", "1")


def test_a_sequence_with_its_own_forward_is_traced() -> None:
    class Backwards(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[0](self[1](x))

    module = Backwards(nn.Linear(6, 5), nn.Linear(4, 6))
    assert split(module, X).names == ("1", "0")


def test_an_output_of_one_tensor_is_unwrapped() -> None:
    model = split(Net(lambda n, x: {"logits": n.b(n.a(x))}), X)  # type: ignore[arg-type,return-value]
    assert torch.equal(model(X), model.module.b(model.module.a(X)))


def test_pieces_share_the_models_state_under_its_names() -> None:
    module = build("resnet18", width=0.125).module
    model = split(module, torch.randn(2, 3, 32, 32))
    assert [key for layer in range(1, 11) for key in model.keys(layer)] == list(module.state_dict())
    for cut in (1, 5, 10):
        both = {**model.client(cut).state_dict(keep_vars=True), **model.server(cut).state_dict(keep_vars=True)}
        assert both.keys() == module.state_dict().keys()
        assert all(both[key] is value for key, value in module.state_dict(keep_vars=True).items())


def test_trained_pieces_load_into_the_original_class() -> None:
    module = build("vit", width=0.25, depth=1).module
    model = split(module, torch.randn(1, 3, 32, 32))
    client, server = copy.deepcopy(model.client(2)), copy.deepcopy(model.server(2))
    with torch.no_grad():
        for parameter in [*client.parameters(), *server.parameters()]:
            parameter.add_(1.0)
    fresh = build("vit", width=0.25, depth=1).module
    fresh.load_state_dict(model.merge_state(client.state_dict(), server.state_dict()))
    for key, value in fresh.state_dict().items():
        assert torch.equal(value, module.state_dict()[key] + 1.0)  # the copies moved, the original did not
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(server.eval()(client.eval()(x)), fresh.eval()(x))


def test_merge_state_refuses_a_key_of_another_model() -> None:
    model = split(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), X)
    with pytest.raises(InvalidInput, match=r"has the key 'head\.weight'"):
        model.merge_state({"head.weight": torch.zeros(1)})


def test_a_piece_takes_other_weights_by_functional_call() -> None:
    model = split(Net(lambda n, x: n.b(n.a(x))), X)
    client = model.client(1)
    doubled = {name: 2 * tensor for name, tensor in client.state_dict().items()}
    assert torch.equal(torch.func.functional_call(client, doubled, (X,)), 2 * client(X))


def test_the_server_at_the_last_cut_returns_its_input() -> None:
    model = split(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), X)
    assert model.server(2)(X) is X
    for cut in (0, 3):
        with pytest.raises(InvalidInput, match="cut"):
            model.client(cut)


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.gate = Gate()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gate(self.stem(x)))


class Gate(nn.Module):
    """Decides by the values of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if float(x.detach().sum()) > 0 else self.linear(-x)


def test_an_untraceable_model_says_where_and_what_to_do() -> None:
    with pytest.raises(InvalidInput, match=r"torch\.fx stopped in 'gate' after node .*torch\.export stopped.*layers="):
        split(Untraceable(), X)


def test_explicit_layers_of_an_untraceable_model(every_cut: Callable[[SplitModel, Tensor], None]) -> None:
    module = Untraceable().double()
    x = X.double()
    model = split(module, x, layers=[module.stem, module.gate, module.head])
    assert model.names == ("stem", "gate", "head")
    every_cut(model, x)
    costs = profile(model, x, batch_size=2)
    assert costs.forward_flops.tolist() == [2 * 16, 2 * 32, 2 * 40]


def test_explicit_layers_of_a_model_with_two_inputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(4, 4)
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.head(self.stem(x) * mask)

    module = Two()
    with pytest.raises(InvalidInput, match=r"needs 2 inputs \(x, mask\)\. Wrap .* layers="):
        split(module, X)
    model = split(module, X, layers=[module.stem, nn.ReLU(), module.head])
    assert model.names == ("stem", "layer_1", "head")
    assert torch.equal(model(X), module.head(module.stem(X).relu()))
    with pytest.raises(InvalidInput, match="model: fails at 'head'"):
        split(module, X, layers=[module.stem, nn.Flatten(0), module.head])


def test_explicit_layers_must_be_the_model() -> None:
    module = Net(lambda n, x: n.d(n.c(n.b(n.a(x)))))
    assert split(module, X, layers=[module.a, module.b, module.c, module.d]).layers == 4
    with pytest.raises(InvalidInput, match=r"layers: leave out b\.weight, b\.bias, c\.weight and 1 more"):
        split(module, X, layers=[module.a, module.d])
    with pytest.raises(InvalidInput, match=r"layers\[1\]: is a Linear with state, but not a module of the model"):
        split(module, X, layers=[module.a, nn.Linear(4, 4)])
    with pytest.raises(InvalidInput, match=r"layers\[0\]: is a str"):
        split(module, X, layers=["a"])  # type: ignore[list-item]
    with pytest.raises(InvalidInput, match="do not have the model's outputs in training mode"):
        split(module, X, layers=[module.b, module.a, module.c, module.d])


def test_an_added_constant_is_found() -> None:
    class Shift(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(InvalidInput, match="do not have the model's outputs"):
        split(module, X, layers=[*module, Shift()])


def test_a_lost_gradient_is_found() -> None:
    class Detach(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.detach()

    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(InvalidInput, match="do not have the model's gradients"):
        split(module, X, layers=[module[0], Detach(), module[1]])


def test_an_input_of_the_wrong_shape_names_the_layer() -> None:
    module = build("vgg16", width=0.125).module
    with pytest.raises(InvalidInput, match=r"of shape \(batch, 3, 64, 64\).* fails in layer 'fc1\.0' \(Linear\): mat1"):
        split(module, torch.randn(1, 3, 64, 64))
    with pytest.raises(InvalidInput, match=r"fails in layer 'conv1_1\.0' \(Conv2d\)"):
        split(module, torch.randn(1, 1, 32, 32))


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda n, x: (n.a(x), n.b(x)), r"returns 2 tensors \(.*\), and a split model returns one.*logits only"),
        (lambda n, x: n.a(x), r"has 1 layer\(s\) with weights, so there is no legal cut"),
        (lambda n, x: n.b(n.a(x) * x.max().item()), "cannot run on shapes alone at 'item'"),
        (lambda n, x: x * 2, r"has 0 layer\(s\) with weights"),
        (
            lambda n, x: n.a(x) + n.b(x),
            "no legal cut: one tensor, batch first, would have to cross, but between 'a' and 'b' there cross 'x', 'a'",
        ),
    ],
)
def test_models_that_cannot_be_cut(run: Callable[[Net, Tensor], Tensor], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        split(Net(run), X)


def test_bad_arguments() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(InvalidInput, match=r"model: is a function\. Give a torch\.nn\.Module"):
        split(lambda x: x, X)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="example_input: is a tuple"):
        split(module, (X, X))  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"example_input: is of shape \(0, 4\)"):
        split(module, torch.zeros(0, 4))
    with pytest.raises(InvalidInput, match="granularity: is 'stage'"):
        split(module, X, granularity="stage")  # type: ignore[arg-type]
