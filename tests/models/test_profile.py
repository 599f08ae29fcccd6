"""The measured costs against hand counts, against the tensors really produced, and on models too big to exist."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from adaptsfl import paper_costs
from adaptsfl.costs import CutCosts
from adaptsfl.errors import InvalidInput
from adaptsfl.models import build, profile, split
from adaptsfl.models.zoo import ZOO

WORK_AND_PAYLOAD = ("forward_flops", "backward_flops", "activation_bits", "gradient_bits", "client_model_bits")


def costs_of(name: str, **options: object) -> CutCosts:
    built = build(name, device="meta", **options)
    assert built.example_input is not None
    return profile(split(built.module, built.example_input), built.example_input, batch_size=16)


def per_layer(values: np.ndarray) -> list[int]:
    return [int(value) for value in np.diff(values, prepend=0.0)]


@pytest.mark.parametrize("classes", [10, 100])
@pytest.mark.parametrize("name", ["vgg16", "resnet18"])
def test_agrees_with_the_hand_count_at_every_cut(name: str, classes: int) -> None:
    """`paper_costs` counts from shapes: k×k weights, c inputs, m outputs on an h×w map take 2·k²·c·m·h·w FLOPs.

    Backward takes twice that, but once in the first layer. Payload is the layer's output, 32 bits a value; the model
    is weights, biases and, in ResNet-18, scale, shift, running mean and variance of every normalisation.
    """
    measured, counted = costs_of(name, classes=classes), getattr(paper_costs, name)(classes, 16)
    for field in WORK_AND_PAYLOAD:
        np.testing.assert_array_equal(getattr(measured, field), getattr(counted, field), err_msg=field)
    assert measured.names == counted.names


def test_vgg16_first_and_last_layers_by_hand() -> None:
    """Layer 1: 3×3, 3 to 64 channels, on 32×32: 2·9·3·64·1024 = 3538944 forward, as much backward (no input gradient).

    Layer 2: 2·9·64·64·1024 = 75497472 forward, twice that backward. Layer 16: 2·512·10 = 10240.
    In all 313.7 million multiply-adds, 627.5 MFLOPs: the known 313 M of VGG-16 on CIFAR-10.
    """
    costs = costs_of("vgg16")
    forward, backward = per_layer(costs.forward_flops), per_layer(costs.backward_flops)
    assert (forward[0], forward[1], forward[15]) == (3538944, 75497472, 10240)
    assert (backward[0], backward[1], backward[15]) == (3538944, 150994944, 20480)
    assert int(costs.forward_flops[-1]) == 627451904
    assert int(costs.activation_bits[0]) == 64 * 32 * 32 * 32
    assert int(costs.client_model_bits[0]) == 32 * (9 * 3 * 64 + 64)


def test_gpt_block_by_hand() -> None:
    """One block, d = 128, t = 64 tokens: qkv 2·t·d·3d, output 2·t·d·d, scores and mix 2·2·t·t·d; perceptron 2·2·t·d·4d.

    Attention 6291456 + 2097152 + 2097152 = 10485760, perceptron 16777216, head 2·64·128·256 = 4194304. The embeddings
    multiply nothing. Backward twice as much, except that an embedding has nothing before it either.
    """
    costs = costs_of("gpt", depth=1)
    assert costs.names == ("tokens", "blocks.0.attention", "blocks.0.mlp", "head")
    assert per_layer(costs.forward_flops) == [0, 10485760, 16777216, 4194304]
    assert per_layer(costs.backward_flops) == [0, 20971520, 33554432, 8388608]


@pytest.mark.parametrize(
    ("layer", "work"),
    [
        (nn.Conv2d(8, 8, 3, padding=1), 2 * 9 * 8 * 8 * 64),
        (nn.Conv2d(8, 8, 3, padding=1, groups=2), 2 * 9 * 4 * 8 * 64),
        (nn.Conv2d(8, 8, 3, padding=1, groups=8), 2 * 9 * 8 * 64),
        (nn.Conv2d(8, 16, 3, padding=1, stride=2, groups=8), 2 * 9 * 16 * 16),
        (nn.ConvTranspose2d(8, 4, 2, stride=2), 2 * 4 * 8 * 4 * 64),
        (nn.ConvTranspose2d(8, 4, 2, stride=2, groups=4), 2 * 4 * 2 * 4 * 64),
    ],
)
def test_convolutions_by_hand(layer: nn.Module, work: int) -> None:
    """On an 8×8 map, every output value takes k² inputs of its group; a transposed one spreads every input so.

    Backward twice that, for input and weight, and once where the input needs no gradient.
    """
    x = torch.zeros(1, 8, 8, 8)
    costs = profile(split(nn.Sequential(nn.Conv2d(8, 8, 1, groups=4), layer), x), x, batch_size=2)
    first = 2 * 2 * 8 * 64
    assert per_layer(costs.forward_flops) == [first, work]
    assert per_layer(costs.backward_flops) == [first, 2 * work]


@pytest.mark.parametrize("name", list(ZOO))
def test_bits_at_each_cut_are_those_of_the_tensors_really_produced(name: str) -> None:
    built = build(name, **({"width": 0.25} if name != "vgg_digits" else {}))
    assert built.example_input is not None
    x = built.example_input.expand(4, *built.example_input.shape[1:]).clone()
    model = split(built.module, x)
    costs = profile(model, x, batch_size=4)
    for cut in range(1, model.layers + 1):
        client = model.client(cut)
        sent = client(x)
        assert costs.activation_bits[cut - 1] * 4 == sent.nbytes * 8
        received = sent.detach().requires_grad_()
        (gradient,) = torch.autograd.grad((model.server(cut)(received) ** 2).sum(), [received])
        assert costs.gradient_bits[cut - 1] * 4 == gradient.nbytes * 8
        averaged = [value for value in client.state_dict().values() if value.is_floating_point()]
        assert costs.client_model_bits[cut - 1] == 8 * sum(value.nbytes for value in averaged)


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        ("float32", [7 * 32, 3 * 32]),
        ("float16", [7 * 16, 3 * 16]),
        ("bfloat16", [7 * 16, 3 * 16]),
        ("int8", [7 * 8 + 16, 3 * 8 + 16]),  # one scale each
        ("int4", [8 * 4 + 16, 4 * 4 + 16]),  # whole bytes
    ],
)
def test_the_wire_dtype_sizes_the_payload_and_not_the_model(dtype: str, bits: list[int]) -> None:
    module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    x = torch.zeros(1, 5)
    costs = profile(split(module, x), x, batch_size=2, wire_dtype=dtype)  # type: ignore[arg-type]
    assert costs.activation_bits.tolist() == bits
    assert costs.gradient_bits.tolist() == bits
    assert costs.client_model_bits.tolist() == [42 * 32, 66 * 32]


@pytest.mark.parametrize(("optimizer", "values"), [("sgd", 2), ("momentum", 3), ("adam", 4)])
def test_memory_by_hand(optimizer: str, values: int) -> None:
    """Linear 5→7, ReLU, linear 7→3, a batch of b: parameters, gradients and optimiser state, 4 bytes each.

    Kept for backward: the input (5 values a sample) by the first product, the ReLU's output (7), once, although the
    ReLU and the second product both keep it. The weights are kept too, but are no activations.
    """
    module = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    x = torch.zeros(1, 5)
    for b in (1, 16):
        costs = profile(split(module, x), x, batch_size=b, optimizer=optimizer)  # type: ignore[arg-type]
        assert costs.memory_bytes is not None
        assert costs.memory_bytes.tolist() == [4 * (values * 42 + 12 * b), 4 * (values * 66 + 12 * b)]


def test_buffers_take_memory_once_and_counters_are_not_averaged() -> None:
    """Batch-norm of 4 channels: scale and shift with gradients, two running statistics, one 8-byte counter."""
    module = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
    x = torch.zeros(1, 3, 2, 2)
    costs = profile(split(module, x), x, batch_size=10)
    assert costs.client_model_bits[0] == 32 * (12 + 4 * 4)
    # Kept: the image (12), the convolution's output (16) for batch-norm, its output (16) for the linear layer is the
    # server's; per batch, the mean and deviation of 4 channels.
    assert costs.memory_bytes is not None
    assert costs.memory_bytes[0] == 4 * (2 * (12 + 8) + 8) + 8 + 4 * 10 * (12 + 16) + 4 * 8


def test_frozen_layers_need_no_gradient() -> None:
    module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 2))
    module[0].requires_grad_(False)
    x = torch.zeros(1, 5)
    costs = profile(split(module, x), x, batch_size=2)
    assert per_layer(costs.backward_flops) == [0, 2 * 21, 2 * 2 * 6]  # the second is now the first with a gradient
    assert costs.gradient_bits.tolist() == [0, 96, 64]


def test_work_that_does_not_grow_with_the_batch_does_not_count_per_sample() -> None:
    class Composed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.c = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(x @ (self.a.weight @ self.b.weight))

    x = torch.zeros(1, 4)
    assert profile(split(Composed(), x), x, batch_size=2).forward_flops.tolist() == [32, 48]


def test_attention_is_counted_where_only_real_tensors_run() -> None:
    """A layer that looks at its data cannot run on the meta device; on the CPU, fused attention would count as no work.

    Linear 2·5·4·4 = 160; scores and mix of 5 tokens, 4 wide, 2·2·5·5·4 = 400.
    """

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x) if float(x.detach().sum()) > 0 else self.linear(-x)
            heads = x.unsqueeze(1)
            return functional.scaled_dot_product_attention(heads, heads, heads).squeeze(1)

    module = nn.Sequential(Looks(), nn.BatchNorm1d(5), Looks())
    x = torch.randn(2, 5, 4)
    assert profile(split(module, x), x, batch_size=2).forward_flops.tolist() == [560, 1120]
    assert int(module.get_buffer("1.num_batches_tracked")) == 0  # real tensors, but not the model's own statistics


def test_nothing_is_computed() -> None:
    devices = set()

    class Spy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            devices.add(x.device.type)
            return x

    x = torch.zeros(1, 4)
    model = split(nn.Sequential(nn.Linear(4, 4), Spy(), nn.Linear(4, 4)), x)
    devices.clear()
    profile(model, x, batch_size=2)
    assert devices == {"meta"}


def test_a_model_larger_than_memory() -> None:
    built = build("gpt", device="meta", width=128.0, depth=9)
    assert built.example_input is not None
    model = split(built.module, built.example_input)
    costs = profile(model, built.example_input, batch_size=1, optimizer="adam")
    assert costs.client_model_bits[-1] / 8 > 100e9
    d, t = 128 * 128, 64
    assert costs.forward_flops[1] == 2 * t * d * 4 * d + 4 * t * t * d


def test_profiling_leaves_the_model_alone() -> None:
    module = build("vgg_digits", norm="batch", dropout=0.5).module.eval()
    x = torch.randn(2, 1, 8, 8)
    model = split(module, x)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    profile(model, x, batch_size=4)
    assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())
    assert not any(part.training for part in [*module.modules(), *model.pieces])
    assert all(parameter.grad is None for parameter in module.parameters())


def test_profiling_leaves_attributes_alone() -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.seen: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.seen = x
            return self.linear(x)

    module = nn.Sequential(nn.Linear(4, 4), Remembers())
    x = torch.zeros(1, 4)
    profile(split(module, x), x, batch_size=2)
    assert module[1].seen is None


def test_bad_arguments() -> None:
    module = build("vgg16", width=0.125).module
    model = split(module, torch.zeros(1, 3, 32, 32))
    with pytest.raises(InvalidInput, match=r"of shape \(batch, 3, 64, 64\) fails in layer 14 \(fc1\)"):
        profile(model, torch.zeros(1, 3, 64, 64), batch_size=1)
    with pytest.raises(InvalidInput, match=r"fails in layer 1 \(conv1_1\)"):
        profile(model, torch.zeros(1, 1, 32, 32), batch_size=1)
    for wrong, given in ((None, "a NoneType"), (torch.tensor(1.0), r"of shape \(\)"), (torch.zeros(0, 3), "of shape")):
        with pytest.raises(InvalidInput, match=f"example_input: is {given}"):
            profile(model, wrong, batch_size=1)  # type: ignore[arg-type]
    x = torch.zeros(1, 3, 32, 32)
    with pytest.raises(
        InvalidInput, match=r"wire_dtype: is 'int2'\. Give one of float32, float16, bfloat16, int8, int4"
    ):
        profile(model, x, batch_size=1, wire_dtype="int2")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="optimizer: is 'lion'"):
        profile(model, x, batch_size=1, optimizer="lion")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="batch_size: is 0"):
        profile(model, x, batch_size=0)
