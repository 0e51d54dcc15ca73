"""States of a small model under any layout, with all local ranks in one process, sharded by torch itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from holdfast.protocol.layouts.layout import Layout
from holdfast.runtime.dtensor.local import is_dtensor, local_of, wrap_like
from holdfast.runtime.dtensor.replica_position import ReplicaPosition
from holdfast.runtime.layouts.boxes import find_box
from holdfast.runtime.state.state import TrainingState


class Model(nn.Module):
    """Tensors of many shapes: five rows for two to four ranks, ten cut in two first, one row, 3D, and empty."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 10), nn.Linear(10, 5)
        self.convolution, self.scale = nn.Conv1d(2, 3, 2), nn.Parameter(torch.rand(1))
        self.nothing = nn.Parameter(torch.zeros(3, 0))
        self.register_buffer("seen", torch.arange(7.0))


class Average:
    """A typical member of `extra`: copies of the parameters, sharded as they are, with a number and a tensor."""

    def __init__(self, model: nn.Module) -> None:
        self.state: dict[str, Any] = {"shadow": {n: p.detach().clone() for n, p in model.named_parameters()}}
        self.state |= {"decay": 0.75, "updates": torch.tensor(0)}

    def update(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.state["shadow"][name].mul_(0.75).add_(parameter.detach() * 0.25)
        self.state["updates"] += 1

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Rows(torch.optim.Optimizer):
    """An optimizer with state of other shapes than its parameters: rows derived from a gradient, and a plain tensor."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: None = None) -> None:
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            rows = parameter.new_zeros((parameter.shape[0], 1, 2))
            local_of(rows).copy_(torch.arange(rows.numel()).view(rows.shape) + number)
            self.state[parameter] = {"step": torch.tensor(1.0), "rows": rows}
            if is_dtensor(parameter):
                self.state[parameter]["seen"] = torch.arange(9.0)


class Late:
    """An average that a script creates after training has begun, with names that match no parameter."""

    def __init__(self) -> None:
        self.copies: list[torch.Tensor] = []

    def state_dict(self) -> dict[str, Any]:
        return {"copies": list(self.copies), "beside": [torch.arange(11.0)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.copies = state["copies"]


class SpreadState:
    """The share of one local rank."""

    def __init__(self, layout: Layout, place: int) -> None:
        """Shard a new model as a script would: matrix products first."""
        torch.manual_seed(7)
        self.place = ReplicaPosition(layout=layout, local_rank=place, has_layout=layout.places > 1)
        self.model = Model()
        self.whole = {name: tensor.clone() for name, tensor in self.model.named_parameters()}
        with connected_to_nobody(layout.places, place):
            mesh = init_device_mesh("cpu", (layout.shard, layout.tensor), mesh_dim_names=("shard", "tensor"))
            if layout.tensor > 1:
                styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(self.model, mesh["tensor"], styles, src_data_rank=None)
            if layout.shard > 1:
                fully_shard(self.model, mesh=mesh["shard"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, foreach=False)
        self.average = Average(self.model)
        self.state = TrainingState(self.model, self.optimizer, {"average": self.average})

    def here(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's share of a whole tensor that is sharded as a parameter is."""
        box = find_box(name, self.model.get_parameter(name), self.place)
        return whole[box.slices_in(type(box).of_whole(whole.shape))].clone()

    def train(self, steps: int = 2) -> None:
        """Run steps with the same gradients under each layout."""
        for step in range(steps):
            torch.manual_seed(step)
            for name, parameter in self.model.named_parameters():
                parameter.grad = wrap_like(self.here(name, torch.randn(parameter.shape)), parameter)
            self.optimizer.step()
            self.average.update(self.model)
        self.model.get_buffer("seen").mul_(2)

    @torch.no_grad()
    def forget(self) -> None:
        """Overwrite everything that a checkpoint restores."""
        for _, tensor in self.state.model_tensors():
            local_of(tensor).fill_(-1)
        self.optimizer.state.clear()
        self.average.state |= {"decay": 0.0, "updates": torch.tensor(-1)}
        for tensor in self.average.state["shadow"].values():
            local_of(tensor).fill_(-1)


@contextmanager
def connected_to_nobody(world: int, rank: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def unit(layout: Layout) -> list[SpreadState]:
    """Return the states of all local ranks of one replica group."""
    return [SpreadState(layout, place) for place in range(layout.places)]
