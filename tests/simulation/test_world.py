import numpy as np
import pytest
import torch

from adaptsfl.errors import InvalidInput
from adaptsfl.simulation.world import make_world
from simulation.tiny import recipe, world


def test_a_narrow_model_learns_while_the_printed_one_is_charged():
    narrow, printed = world(), world(model={"options": {"width": 1.0}})
    charged = world(model={"charged_as": {"width": 1.0}})
    assert np.array_equal(charged.costs.forward_flops, printed.costs.forward_flops)
    assert np.array_equal(charged.costs.client_model_bits, printed.costs.client_model_bits)
    assert charged.costs.forward_flops[-1] > narrow.costs.forward_flops[-1]
    mine, theirs = charged.model.module.state_dict(), narrow.model.module.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_a_model_with_other_layers_cannot_be_charged():
    with pytest.raises(InvalidInput, match=r"model\.charged_as: gives a model of \d layers, the one"):
        world(model={"name": "vit", "options": {"depth": 1, "width": 0.25}, "charged_as": {"depth": 2}})


def test_worlds_that_differ_in_their_fleet_share_model_and_data():
    first = world(fleet={"uplink_mbps": 5.0})
    second = make_world(recipe(fleet={"uplink_mbps": 9.0}), 0, like=first)
    alone = world(fleet={"uplink_mbps": 9.0})
    assert second.model is first.model
    assert second.data is first.data
    assert np.array_equal(second.fleet_at(3).uplink_bps, alone.fleet_at(3).uplink_bps)
    assert second.recipe == alone.recipe
    assert second.learning_identity == alone.learning_identity == first.learning_identity


def test_a_fleet_of_another_size_shares_out_the_data_anew():
    first = world()
    second = make_world(recipe(fleet={"devices": 3}), 0, like=first)
    assert second.devices == 3
    assert second.learning_identity == world(fleet={"devices": 3}).learning_identity != first.learning_identity
