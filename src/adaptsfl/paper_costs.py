"""Cut costs of the paper's two networks, counted by hand from their shapes.

Convolutions and fully connected layers carry practically all the work: k×k weights, c inputs and m outputs on an
h×w map take 2·k²·c·m·h·w FLOPs forward. Backward takes twice that, once for the weights' gradient and once for the
input's, except in the very first layer, whose input needs no gradient. Activation functions, pooling and normalisation
count as zero FLOPs, as in torch's own counter; pooling belongs to the layer before it. Tests compare profiled models
with these counts, and code that must not import torch uses them.
"""

from adaptsfl.costs import CutCosts, LayerCost, cut_costs

IMAGE = 32  # CIFAR images are 32×32 with three channels
COLOURS = 3


def vgg16(classes: int, batch_size: int) -> CutCosts:
    """VGG-16 for 32×32 images: 13 convolutions and 3 fully connected layers of width 512, so L = 16."""
    layers: list[LayerCost] = []
    channels, size = COLOURS, IMAGE
    for block, (width, convolutions) in enumerate([(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)], start=1):
        for k in range(1, convolutions + 1):
            pool = 2 if k == convolutions else 1
            layers.append(_convolution(f"conv{block}_{k}", channels, width, size, first=not layers, pool=pool))
            channels, size = width, size // pool
    layers += [_linear("fc1", 512, 512), _linear("fc2", 512, 512), _linear("fc3", 512, classes)]
    return cut_costs(layers, batch_size)


def resnet18(classes: int, batch_size: int) -> CutCosts:
    """ResNet-18 with the CIFAR stem: 17 convolutions and 1 fully connected layer, in L = 10 pieces.

    Two tensors cross the inside of a residual block, so a cut can only lie at its end: the pieces are the stem, eight
    blocks of two convolutions (three where the shortcut changes shape) and the fully connected layer.
    """
    layers = [_convolution("stem", COLOURS, 64, IMAGE, first=True, bias=False, norm=True)]
    channels, size = 64, IMAGE
    for stage, width in enumerate((64, 128, 256, 512), start=1):
        for k in (1, 2):
            stride = 2 if stage > 1 and k == 1 else 1
            size //= stride
            parts = [
                _convolution("", channels, width, size, bias=False, norm=True),
                _convolution("", width, width, size, bias=False, norm=True),
            ]
            if channels != width:
                parts.append(_convolution("", channels, width, size, kernel=1, bias=False, norm=True))
            layers.append(_block(f"block{stage}_{k}", parts, outputs=width * size * size))
            channels = width
    layers[-1] = _block(layers[-1].name, [layers[-1]], outputs=512)  # global average pooling
    layers.append(_linear("fc", 512, classes))
    return cut_costs(layers, batch_size)


def _convolution(
    name: str,
    channels: int,
    width: int,
    size: int,
    *,
    kernel: int = 3,
    first: bool = False,
    bias: bool = True,
    norm: bool = False,
    pool: int = 1,
) -> LayerCost:
    weights = kernel * kernel * channels * width
    forward = 2 * weights * size * size
    full, pooled = width * size * size, width * (size // pool) ** 2
    return LayerCost(
        name,
        forward_flops=forward,
        backward_flops=forward if first else 2 * forward,
        output_values=pooled,
        # Normalisation adds scale and shift, and running mean and variance, which are averaged with the layer.
        parameters=weights + (width if bias else 0) + (4 * width if norm else 0),
        # Kept for the backward pass: the map, once more if normalised, and the pooled map; the first layer's image.
        saved_values=full * (2 if norm else 1) + (pooled if pool > 1 else 0) + (channels * size**2 if first else 0),
    )


def _linear(name: str, inputs: int, outputs: int) -> LayerCost:
    forward = 2 * inputs * outputs
    return LayerCost(name, forward, 2 * forward, outputs, inputs * outputs + outputs, outputs)


def _block(name: str, parts: list[LayerCost], outputs: int) -> LayerCost:
    return LayerCost(
        name,
        forward_flops=sum(part.forward_flops for part in parts),
        backward_flops=sum(part.backward_flops for part in parts),
        output_values=outputs,
        parameters=sum(part.parameters for part in parts),
        saved_values=sum(part.saved_values for part in parts),
    )
