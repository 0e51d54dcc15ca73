"""torch's default process group within a replica: it has a rank and a size, and refuses all collectives.

`torch.distributed.is_initialized`, `get_rank` and `get_world_size` must work to create meshes; they describe the
replica. A collective on the default group is refused: it could mean one replica or all of them.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from holdfast.errors import BadInputError

_ProcessGroup: Any = dist.ProcessGroup
NAME = "holdfast-replica"


def _refuse(what: str) -> NoReturn:
    """Refuse an operation on torch's default process group, `what`.

    Raises:
        BadInputError: always; it says which groups to use instead.
    """
    raise BadInputError(
        f"{what} on torch's default process group: under holdfast it only tells which part of the model replica "
        "this process has, and has no connections; name a dimension of the mesh, as in dist.all_reduce(tensor, "
        'group=job.mesh.get_group("shard")) or fully_shard(module, mesh=job.mesh["shard"]), use step.log() or '
        "job.evaluate() to combine values of all replicas, and remove DistributedDataParallel"
    )


def _make_refused(name: str) -> Any:
    """Return a method for a process group that refuses the collective `name`: it raises BadInputError whenever it is
    called.
    """

    def collective(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(f"{name}()")

    collective.__name__ = name
    return collective


class DefaultGroup(_ProcessGroup):
    """One rank per role of a replica. Every collective raises BadInputError."""

    def __init__(self, rank: int, size: int) -> None:
        _ProcessGroup.__init__(self, rank, size)

    def getGroupName(self) -> str:
        return NAME

    def getGroupDesc(self) -> str:
        return "holdfast's replica"

    def getBackendName(self) -> str:
        return "holdfast"

    @property
    def group_name(self) -> str:
        return NAME

    @property
    def group_desc(self) -> str:
        return "holdfast's replica"

    all_gather_single = _allgather_base = _make_refused("all_gather_single")
    all_gather_single_coalesced = allgather_into_tensor_coalesced = _make_refused("all_gather_single_coalesced")
    allgather = _make_refused("all_gather")
    allgather_coalesced = _make_refused("all_gather_coalesced")
    reduce_scatter = _make_refused("reduce_scatter")
    reduce_scatter_single = _reduce_scatter_base = _make_refused("reduce_scatter_single")
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced = _make_refused("reduce_scatter_single_coalesced")
    allreduce = _make_refused("all_reduce")
    allreduce_coalesced = _make_refused("all_reduce_coalesced")
    all_to_all_single = alltoall_base = _make_refused("all_to_all_single")
    alltoall = _make_refused("all_to_all")
    broadcast = _make_refused("broadcast")
    scatter = _make_refused("scatter")
    gather = _make_refused("gather")
    reduce = _make_refused("reduce")
    barrier = _make_refused("barrier")
    monitored_barrier = _make_refused("monitored_barrier")
    send = _make_refused("send")
    recv = recv_anysource = _make_refused("recv")
    split_group = splitGroup = _make_refused("split_group")
    _start_coalescing = _end_coalescing = _make_refused("coalescing")


def refuse_new_group(*_: Any) -> NoReturn:
    """Refuse to create a group. torch calls this as the constructor of our backend."""
    _refuse("new_group()")


class RefusingStore(Store):
    """A store that torch would use to create more groups; all its methods raise."""

    def set(self, key: str, value: bytes | str) -> None:
        _refuse("new_group()")

    def get(self, key: str) -> bytes:
        _refuse("new_group()")

    def add(self, key: str, value: int) -> int:
        _refuse("new_group()")

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        _refuse("new_group()")

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        _refuse("new_group()")

    def check(self, keys: list[str]) -> bool:
        _refuse("new_group()")

    def delete_key(self, key: str) -> bool:
        _refuse("new_group()")

    def num_keys(self) -> int:
        _refuse("new_group()")

    def has_extended_api(self) -> bool:
        return False
