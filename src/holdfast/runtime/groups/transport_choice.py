"""Chooses the transport of a generation's group, and whether its members meet all at once or level by level."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from holdfast.errors import BadInputError
from holdfast.planning.levels import FAN_OUT, FLAT_UP_TO, compute_levels
from holdfast.protocol.job_spec import AUTO, Backend
from holdfast.runtime.groups.abandoned_groups import GroupReaper
from holdfast.runtime.groups.communicator import OPERATION_S, Communicator, HaltCheck, LocalCommunicator
from holdfast.runtime.groups.hierarchical import build_hierarchical
from holdfast.runtime.groups.rendezvous import Board
from holdfast.runtime.groups.transports.gloo import build_gloo
from holdfast.runtime.groups.transports.nccl import build_nccl
from holdfast.runtime.groups.transports.staged import StagedCommunicator


def build_communicator(
    device: torch.device,
    board: Board,
    rank: int,
    nodes: Sequence[str],
    *,
    generation: int,
    reaper: GroupReaper,
    members: Sequence[int] | None = None,
    name: str = "",
    any_to_any: bool = True,
    backend: Backend = AUTO,
    host: str = "127.0.0.1",
    timeout_s: float = OPERATION_S,
    build_timeout_s: float = 10.0,
    halt: threading.Event | HaltCheck | None = None,
    flat_up_to: int = FLAT_UP_TO,
    fan_out: int = FAN_OUT,
) -> Communicator:
    """Build the group of a generation, or of some of its members: on NCCL for CUDA tensors, else on gloo; flat, or by
    levels if there are more than `flat_up_to` members. Without NCCL, CUDA tensors go through host memory. A single
    member needs no connection. Blocks.

    NCCL finds its own paths within and between nodes, so there all members form one group.

    Args:
        device: the device of the tensors.
        rank: this worker's rank in the generation, also if only some `members` form the group.
        nodes: the node of each member.
        members, name, host, timeout_s, build_timeout_s, halt: see `build_gloo`.
        reaper: destroys the group after it is retired.
        any_to_any: whether any rank sends tokens or experts to any other. If False, a group by levels only allows
            operations in its `groups`; its own ones raise RuntimeError.
        backend: the library that exchanges CUDA tensors: `AUTO` is NCCL if torch has it, else gloo; "gloo" stages them
            through host memory.
        flat_up_to, fan_out: see planning.levels.

    Raises:
        HaltedError: the generation was halted meanwhile.
        PeerLostError: a member did not join, or was lost again.
    """
    if len(nodes) == 1:
        return LocalCommunicator(generation=generation, halt=halt)
    times = {"timeout_s": timeout_s, "build_timeout_s": build_timeout_s}
    ranks = range(len(nodes)) if members is None else members
    place = ranks.index(rank)
    if uses_nccl(device, backend):
        return build_nccl(
            board,
            place,
            len(nodes),
            members=ranks,
            name=name,
            generation=generation,
            device=device,
            reaper=reaper,
            **times,
            halt=halt,
            nodes=len(set(nodes)),
        )

    gloo = partial(build_gloo, board, generation=generation, reaper=reaper, host=host, halt=halt, **times)

    def build(level: str, places: Sequence[int]) -> Communicator:
        return gloo(places.index(place), len(places), name=name + level, members=[ranks[one] for one in places])

    levels = compute_levels(nodes, place, flat_up_to=flat_up_to, fan_out=fan_out)
    if len(levels.owners) == 1:
        communicator = build("", levels.groups[0])
    else:
        communicator = build_hierarchical(build, board, levels, place, len(nodes), any_to_any=any_to_any, halt=halt)
    return communicator if device.type == "cpu" else StagedCommunicator(communicator, device)


def uses_nccl(device: torch.device, backend: Backend) -> bool:
    """Return whether NCCL exchanges the tensors of this device: never for the CPU; for a GPU if `backend` is "nccl", or
    if it is `AUTO` and torch has NCCL.
    """
    if device.type != "cuda":
        return False
    return dist.is_nccl_available() if backend == AUTO else backend == "nccl"


def choose_device(local_rank: int, backend: Backend) -> torch.device:
    """Return a worker's device: GPU `local_rank` of its node, or the CPU if there is no GPU. Make a GPU torch's current
    device.

    If NCCL is not used, the workers of a node may outnumber its GPUs and share them, in turn.

    Raises:
        BadInputError: NCCL is used, and the node has no GPU of this number.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if local_rank >= gpus and uses_nccl(torch.device("cuda"), backend):
        raise BadInputError(
            f"worker {local_rank} of this node has no GPU: the node has {gpus}, and NCCL needs one for each worker; "
            "start fewer workers per node, or share the GPUs with --set backend=gloo"
        )
    device = torch.device("cuda", local_rank % gpus)
    torch.cuda.set_device(device)
    return device
