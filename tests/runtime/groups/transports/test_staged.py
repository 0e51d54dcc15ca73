"""Collectives through host memory, here with CPU tensors on both sides, and the choice of a backend."""

import pytest
import torch

from holdfast.errors import BadInputError
from holdfast.runtime.groups import transport_choice as choose
from holdfast.runtime.groups.communicator import HaltedError, LocalCommunicator, Pending
from holdfast.runtime.groups.sums import finish_sums, start_sums
from holdfast.runtime.groups.transport_choice import choose_device, uses_nccl
from holdfast.runtime.groups.transports.staged import StagedCommunicator
from tests.harness.local_world import Seat, run_world

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def _collectives(seat: Seat) -> dict[str, list[float]]:
    inner = seat.connect(1)
    comm, rank = StagedCommunicator(inner, CPU), seat.rank
    results: dict[str, list[float]] = {}

    # Rank 0 sends one row to itself and two to rank 1; rank 1 sends two rows and one.
    send, receive = ([1, 2], [1, 2]) if rank == 0 else ([2, 1], [2, 1])
    output = torch.empty(3)
    pending = comm.start_all_to_all(output, torch.arange(3.0) + 10 * rank, receive, send)
    comm.wait(pending)
    comm.wait(pending)  # A second wait has no effect.
    results["all_to_all"] = output.tolist()

    for name, count in (("small", 2), ("large", 1 << 16)):
        gathered = torch.zeros(2 * count)
        mine = gathered[rank * count : (rank + 1) * count]
        mine.fill_(rank + 1)
        comm.wait(comm.start_all_gather(gathered, mine))
        results[f"all_gather, {name}"] = [gathered[0].item(), gathered[-1].item()]

    spread = torch.full((2,), 7.0) if rank == 0 else torch.zeros(2)
    comm.wait(comm.start_gather_from_owners(spread, spread if rank == 0 else spread[:0], 1))
    results["spread"] = spread.tolist()

    broadcast = torch.full((2, 2), float(rank), dtype=torch.float64)
    comm.wait(comm.start_broadcast(broadcast, 1))
    results["broadcast"] = broadcast.flatten().tolist()

    pair = torch.full((3,), float(rank))
    comm.wait(comm.start_send(pair, 1, tag=5) if rank == 0 else comm.start_receive(pair, 0, tag=5))
    results["send, receive"] = pair.tolist()

    results["sums"] = finish_sums(start_sums(comm, [1.0, rank], "commit"))
    comm.retire()
    with pytest.raises(HaltedError, match="retired"):
        comm.start_all_gather(torch.empty(2), torch.empty(1))
    return results


def test_every_operation_has_the_result_of_the_inner_communicator():
    first, second = run_world(2, _collectives)
    assert first == {
        "all_to_all": [0, 10, 11],
        "all_gather, small": [1, 2],
        "all_gather, large": [1, 2],
        "spread": [7, 7],
        "broadcast": [1, 1, 1, 1],
        "send, receive": [0, 0, 0],
        "sums": [2, 1],
    }
    assert second == {**first, "all_to_all": [1, 2, 12]}


def _levels(seat: Seat) -> tuple[tuple[int, ...], list[int], list[float]]:
    inner = seat.connect(1, nodes=["a", "a", "b", "b"], any_to_any=False, flat_up_to=1, fan_out=2)
    comm = StagedCommunicator(inner, CPU)
    sums = finish_sums(start_sums(comm, [1.0, seat.rank], "commit"))
    comm.retire()
    return comm.owners, [group.size for group in comm.groups], sums


def test_levels_are_those_of_the_inner_communicator():
    for owners, sizes, sums in run_world(4, _levels):
        assert len(owners) == 2
        assert sizes == [2, 2]
        assert sums == [4, 6]


def test_the_output_of_an_abandoned_operation_is_unchanged():
    inner = _Endless(halt=lambda: True)
    output = torch.zeros(2)
    comm = StagedCommunicator(inner, CPU)
    pending = comm.start_all_gather(output, torch.ones(2))
    with pytest.raises(HaltedError):
        comm.wait(pending)
    assert output.tolist() == [0, 0]


class _Endless(LocalCommunicator):
    def start_all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        output.copy_(input)
        return Pending("all_gather", self)

    def done(self) -> bool:
        return False

    def sleep(self, seconds: float) -> None: ...

    def finish(self) -> None: ...


@pytest.mark.parametrize(
    ("device", "backend", "available", "wanted"),
    [
        (CPU, "auto", True, False),
        (CPU, "nccl", True, False),
        (CUDA, "auto", True, True),
        (CUDA, "auto", False, False),
        (CUDA, "nccl", False, True),
        (CUDA, "gloo", True, False),
    ],
)
def test_nccl_is_chosen_by_device_backend_and_availability(
    monkeypatch: pytest.MonkeyPatch, device, backend, available, wanted
):
    monkeypatch.setattr(choose.dist, "is_nccl_available", lambda: available)
    assert uses_nccl(device, backend) is wanted


def test_workers_share_gpus_only_without_nccl(monkeypatch: pytest.MonkeyPatch):
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert choose_device(1, "nccl") == torch.device("cuda", 1)
    assert choose_device(3, "gloo") == torch.device("cuda", 1)
    assert chosen == [torch.device("cuda", 1)] * 2
    with pytest.raises(BadInputError, match="worker 3 of this node has no GPU: the node has 2"):
        choose_device(3, "nccl")


def test_without_a_gpu_the_device_is_the_cpu():
    assert choose_device(3, "nccl") == CPU
