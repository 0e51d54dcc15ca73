"""Replicated state must be equal on all local ranks, or is refused, because no later step repairs it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from replicas import replica_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from holdfast.errors import BadInputError
from holdfast.protocol.layouts.layout import Layout
from holdfast.runtime.dtensor.local import local_of
from holdfast.runtime.layouts.mesh import ReplicaMesh
from holdfast.runtime.session.replica_group.replicated_state import check_replicated
from holdfast.runtime.state.state import TrainingState
from tests.harness.local_world import Seat, run_world


class Kept:
    """A script's object in `extra`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"mean": self.tensor}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.tensor = state["mean"]


def sharded(replica: ReplicaMesh, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    fully_shard(model, mesh=replica.mesh["shard"])
    return model


def unseeded(replica: ReplicaMesh, place: int) -> TrainingState:
    """The tensor-parallel layer is broadcast from rank 0, but the other layer differs on each rank."""
    torch.manual_seed(place)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
    parallelize_module(model, replica.mesh["tensor"], {"0": ColwiseParallel()})
    return TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1))


def averaged(replica: ReplicaMesh, place: int, kept: Callable[[torch.Tensor], torch.Tensor]) -> TrainingState:
    """Shards of differently initialised models are valid: each rank has its own part of one model."""
    model = sharded(replica, seed=place)
    average = Kept(kept(next(model.parameters()).detach()))
    return TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1), {"average": average})


def complaints(seat: Seat) -> list[str]:
    """Return the error for each state, or "" for a valid one."""
    found: list[str] = []
    for layout, made in (
        (Layout(shard=2), lambda replica: averaged(replica, seat.rank, lambda mean: mean.clone())),
        (Layout(shard=2), lambda replica: averaged(replica, seat.rank, lambda mean: local_of(mean).clone())),
        (Layout(tensor=2), lambda replica: unseeded(replica, seat.rank)),
    ):
        with replica_of(seat, layout) as (replica, _):
            communicators = [replica.groups[dimension].communicator for dimension in replica.connected_ranks]
            try:
                check_replicated(made(replica), [one for one in communicators if one is not None])
                found.append("")
            except BadInputError as error:
                found.append(str(error))
    return found


def test_a_replicated_tensor_that_differs_between_ranks_is_named() -> None:
    for alike, local, plain in run_world(2, complaints):
        assert alike == ""
        assert local.startswith("'extra:average:mean' is not sharded, and differs between the ranks of a replica group")
        assert plain.startswith("'1.weight' is not sharded")


def test_a_single_rank_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingState, "capture", lambda _: pytest.fail("the state was captured"))
    model = nn.Linear(2, 2)
    check_replicated(TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1)), ())
