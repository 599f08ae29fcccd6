import numpy as np
import pytest

from adaptsfl.costs import CutCosts, LayerCost, cut_costs
from adaptsfl.errors import InvalidInput
from adaptsfl.paper_costs import resnet18, vgg16


def test_vgg16_counts():
    """13 convolutions and 3 fully connected layers.

    Multiply-adds of block 1: 9·(3·64 + 64·64)·32² = 39,518,208; block 2: 9·(64·128 + 128·128)·16² = 56,623,104;
    block 3: 9·(128·256 + 2·256·256)·8² = 94,371,840; block 4: 9·(256·512 + 2·512·512)·4² = 94,371,840;
    block 5: 9·3·512·512·2² = 28,311,552; fully connected: 2·512·512 + 512·10 = 529,408. Twice that in FLOPs.
    Parameters: 14,714,688 in convolutions (with biases) and 2·262,656 + 5,130 after them.
    """
    costs = vgg16(10, 16)
    assert costs.layers == 16
    adds = 39_518_208 + 56_623_104 + 94_371_840 + 94_371_840 + 28_311_552 + 529_408
    assert costs.forward_flops[-1] == 2 * adds
    assert costs.client_model_bits[-1] == 32 * (14_714_688 + 2 * 262_656 + 5_130)
    assert costs.backward_flops[-1] == 2 * costs.forward_flops[-1] - costs.forward_flops[0]
    assert costs.activation_bits[1] == 32 * 64 * 16 * 16  # after the first pooling
    assert costs.name(4) == "conv2_2"
    # Cut 1 with batches of 16: 1,792 parameters and their gradients, the image and the first map, 4 bytes each.
    assert costs.memory_bytes[0] == 4 * (2 * 1_792 + 16 * (3 * 32 * 32 + 64 * 32 * 32))


def test_resnet18_counts():
    """17 convolutions, 3 projections and 1 fully connected layer, in ten pieces that a cut can lie between.

    Multiply-adds: stem 9·3·64·32² = 1,769,472; stage 1: 4·9·64²·32² = 150,994,944; each later stage s with width w on
    a map of h×h: 9·(w/2)·w·h² + 3·9·w²·h² + (w/2)·w·h² = 134,217,728 (all three alike); last 512·10.
    Parameters 11,173,962, plus 9,600 running means and variances that are averaged too.
    """
    costs = resnet18(10, 16)
    assert costs.layers == 10
    assert costs.forward_flops[-1] == 2 * (1_769_472 + 150_994_944 + 3 * 134_217_728 + 5_120)
    assert costs.client_model_bits[-1] == 32 * (11_173_962 + 9_600)
    assert costs.activation_bits[-2] == 32 * 512  # after the global pooling


def test_layers_add_up():
    """Two layers; batches of 3; Adam keeps two numbers per parameter: 4·(4·(5 + 7) + 3·(11 + 13)) bytes at cut 2."""
    layers = [LayerCost("a", 10, 20, 6, 5, 11), LayerCost("b", 30, 60, 2, 7, 13)]
    costs = cut_costs(layers, batch_size=3, optimizer_values=2)
    assert costs.forward_flops.tolist() == [10, 40]
    assert costs.backward_flops.tolist() == [20, 80]
    assert costs.activation_bits.tolist() == costs.gradient_bits.tolist() == [192, 64]
    assert costs.client_model_bits.tolist() == [160, 384]
    assert costs.memory_bytes.tolist() == [4 * (4 * 5 + 3 * 11), 4 * (4 * 12 + 3 * 24)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"forward_flops": [2.0, 1.0]}, r"forward_flops\[1\]: is 1, below 2 before it.*Give cumulative values"),
        ({"client_model_bits": [1.0]}, r"client_model_bits: has 1 entries, expected 2"),
        ({"activation_bits": [1.0, np.inf]}, r"activation_bits\[1\]: is inf"),
        ({"memory_bytes": [1.0, -1.0]}, r"memory_bytes\[1\]: is -1"),
        ({"names": ("a",)}, r"names: has 1 entries"),
        ({"gradient_bits": ["x", "y"]}, r"gradient_bits: is not a list of numbers"),
    ],
)
def test_bad_costs_are_explained(change, message):
    fields = ("forward_flops", "backward_flops", "activation_bits", "gradient_bits", "client_model_bits")
    good = {field: [1.0, 2.0] for field in fields}
    with pytest.raises(InvalidInput, match=message):
        CutCosts(**{**good, **change})


def test_activation_sizes_may_fall_with_the_cut():
    CutCosts([1.0, 2.0], [1.0, 2.0], [9.0, 1.0], [9.0, 1.0], [1.0, 2.0])
