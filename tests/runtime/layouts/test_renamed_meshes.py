"""Meshes with other libraries' dimension names: the groups are the same, and shards are located correctly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor, Replicate, Shard

import holdfast
from holdfast.errors import BadInputError
from holdfast.protocol.layouts.layout import Layout
from holdfast.protocol.plan import Role
from holdfast.runtime.dtensor.local import layout_dimensions
from holdfast.runtime.dtensor.replica_position import ReplicaPosition
from holdfast.runtime.layouts.boxes import find_box
from holdfast.runtime.layouts.mesh import ReplicaMesh
from holdfast.runtime.tensors import strip_wrapper_prefixes

LAYOUT, PLACE = Layout(shard=2, tensor=2), 2


@pytest.fixture
def replica() -> Iterator[ReplicaMesh]:
    """Local rank 2 of four, with the second shard and the first tensor rank; this test runs no collectives."""
    replica = ReplicaMesh(LAYOUT, Role(place=PLACE), torch.device("cpu"))
    yield replica
    replica.close()


def test_other_names_for_the_same_groups(replica: ReplicaMesh) -> None:
    mesh = replica.rename_dimensions({"replicas": "", "fsdp": "shard", "context": "", "tp": "tensor"})
    assert mesh.mesh_dim_names == ("replicas", "fsdp", "context", "tp")
    assert tuple(mesh.shape) == (1, 2, 1, 2)
    assert list(mesh.get_coordinate() or ()) == [0, 1, 0, 0]
    assert mesh.get_group("fsdp") is replica.groups["shard"]
    assert mesh["tp"].get_group() is replica.groups["tensor"]
    assert layout_dimensions(mesh) == ("single", "shard", "single", "tensor")
    alone = replica.rename_dimensions({"tp": "tensor"})
    assert alone.mesh.tolist() == [2, 3]
    assert layout_dimensions(alone) == ("tensor",)


@pytest.mark.parametrize("names", [{}, {"a": "tensor", "b": "shard"}, {"a": "shard", "b": "shard"}, {"a": "pipeline"}])
def test_invalid_dimension_names_are_refused(replica: ReplicaMesh, names: dict[str, str]) -> None:
    with pytest.raises(BadInputError, match=r"^job\.mesh_as\(.*\): give \"shard\", \"tensor\", or \"\""):
        replica.rename_dimensions(names)


def test_the_local_box_of_a_tensor_is_independent_of_dimension_names(replica: ReplicaMesh) -> None:
    place = ReplicaPosition(layout=LAYOUT, local_rank=PLACE, has_layout=True)
    cut = torch.zeros(3, 4)
    for names in ({"shard": "shard", "tensor": "tensor"}, {"fsdp": "shard", "tp": "tensor"}):
        mesh = replica.rename_dimensions(names)
        spread = DTensor.from_local(cut, mesh, (Shard(0), Shard(1)), run_check=False, shape=(6, 8), stride=(8, 1))
        box = find_box("weight", spread, place)
        assert (box.offset, box.shape) == ((3, 0), (3, 4))
        assert place.is_counted_here(spread)
        everywhere = DTensor.from_local(cut, mesh, (Replicate(), Shard(1)), run_check=False)
        assert not place.is_counted_here(everywhere)  # The first shard counts it.


def test_a_job_without_a_layout_has_no_mesh() -> None:
    with pytest.raises(BadInputError, match=r"every worker holds the whole model"):
        holdfast.init().mesh_as(dp="shard")


def test_a_parameter_name_omits_compile_and_checkpoint_wrappers() -> None:
    model = torch.nn.Sequential(checkpoint_wrapper(torch.nn.Linear(1, 1)))
    assert [strip_wrapper_prefixes(name) for name, _ in model.named_parameters()] == ["0.weight", "0.bias"]
    assert strip_wrapper_prefixes("0._orig_mod.weight") == "0.weight"
