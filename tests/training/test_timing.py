"""Layers are timed without changing the model."""

import math

import torch

from adaptsfl.models import build, split
from adaptsfl.training.timing import time_layers


def test_every_layer_is_timed() -> None:
    built = build("vgg_digits", width=0.25)
    assert built.example_input is not None
    model = split(built.module, built.example_input)
    before = {name: tensor.clone() for name, tensor in built.module.state_dict().items()}
    times = time_layers(model, built.example_input, 8)
    assert len(times.forward_s) == len(times.backward_s) == model.layers
    assert all(0 < seconds < math.inf for seconds in (*times.forward_s, *times.backward_s))
    assert all(torch.equal(before[name], tensor) for name, tensor in built.module.state_dict().items())
