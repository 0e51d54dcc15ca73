"""A sharded model that was never assembled starts with the same bits as an unsharded one."""

from __future__ import annotations

import pytest
import torch
from sharded_gpt import GPT, shard
from spread_states import connected_to_nobody
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from holdfast.errors import BadInputError
from holdfast.protocol.layouts.layout import Layout
from holdfast.runtime.dtensor.local import local_of
from holdfast.runtime.dtensor.replica_position import WHOLE_REPLICA, ReplicaPosition
from holdfast.runtime.layouts.boxes import find_box
from holdfast.runtime.layouts.starting import materialize

CPU = torch.device("cpu")


def start(module: nn.Module) -> None:
    """Initialise a model as many scripts do: by module type, with a function that inspects the values."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.5, a=-0.5, b=0.5)
    if isinstance(module, nn.Embedding):
        nn.init.orthogonal_(module.weight)


@pytest.mark.parametrize("layout", [Layout(), Layout(shard=3), Layout(tensor=2), Layout(shard=2, tensor=2)], ids=str)
def test_all_ranks_start_with_their_shards_of_the_serial_model(layout: Layout):
    torch.manual_seed(4)
    serial = GPT().apply(start).to(torch.float64)
    drawn = torch.get_rng_state()
    for number in range(layout.places):
        place = ReplicaPosition(layout=layout, local_rank=number, has_layout=True)
        with connected_to_nobody(layout.places, number):
            mesh = init_device_mesh("cpu", (layout.shard, layout.tensor), mesh_dim_names=("shard", "tensor"))
            with torch.device("meta"):
                model = GPT()
            shard(model, mesh)
            torch.manual_seed(4)
            materialize(model, [start], CPU, place)
            model.to(torch.float64)
        assert torch.equal(torch.get_rng_state(), drawn)
        for name, parameter in model.named_parameters():
            box = find_box(name, parameter, place)
            wanted = serial.get_parameter(name)[box.slices_in(type(box).of_whole(parameter.shape))]
            assert torch.equal(local_of(parameter), wanted), name


class Tied(nn.Module):
    """The first and last layers share a weight, as in language models, and one buffer is registered twice."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.inner, self.head = nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.tokens.weight
        for module in (self, self.inner):
            module.register_buffer("scale", torch.ones(()) if module is self else self.scale)

    def reset_parameters(self) -> None:
        self.scale.fill_(1.0)


@pytest.mark.parametrize("layout", [Layout(), Layout(shard=2)], ids=str)
def test_tied_parameters_stay_tied(layout: Layout):
    torch.manual_seed(4)
    serial = Tied().apply(start)
    for number in range(layout.places):
        place = ReplicaPosition(layout=layout, local_rank=number, has_layout=True)
        with connected_to_nobody(layout.places, number):
            mesh = init_device_mesh("cpu", (layout.shard, 1), mesh_dim_names=("shard", "tensor"))
            with torch.device("meta"):
                model = Tied()
            if layout.shard > 1:
                fully_shard(model, mesh=mesh["shard"])
            torch.manual_seed(4)
            materialize(model, [start], CPU, place)
        assert model.head.weight is model.tokens.weight
        assert model.inner.scale is model.scale
        for name, parameter in model.named_parameters():
            box, whole = find_box(name, parameter, place), serial.get_parameter(name)
            assert torch.equal(local_of(parameter), whole[box.slices_in(type(box).of_whole(whole.shape))]), name


def test_parameters_that_got_no_value_are_named():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.inner = nn.Linear(3, 3)
            self.register_buffer("angles", torch.arange(3.0))

        def fill(self) -> None:
            self.angles = torch.arange(3.0)

    with torch.device("meta"):
        model = Scaled()
    with pytest.raises(BadInputError, match=r"'scale', 'angles' got no value: give a function of a module"):
        materialize(model, [], CPU, WHOLE_REPLICA)

    def filled(module: nn.Module) -> None:
        if isinstance(module, Scaled):
            module.fill()
            module.scale = nn.Parameter(torch.full((3,), 2.0))

    kept = model.scale
    materialize(model, [filled], CPU, WHOLE_REPLICA)
    assert model.scale is kept
    assert kept.tolist() == [2.0] * 3
    assert model.angles.tolist() == [0.0, 1.0, 2.0]


def test_a_partly_filled_sharded_parameter_is_refused():
    place = ReplicaPosition(layout=Layout(shard=2), local_rank=0, has_layout=True)
    with connected_to_nobody(2, 0):
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("shard", "tensor"))
        with torch.device("meta"):
            model = shard(GPT(), mesh)

        def padded(module: nn.Module) -> None:
            if isinstance(module, nn.Embedding):
                module.weight[0] = 0.0

        with pytest.raises(BadInputError, match=r"'weight' of shape \(12, 8\) was filled only in part"):
            materialize(model, [padded], CPU, place)
