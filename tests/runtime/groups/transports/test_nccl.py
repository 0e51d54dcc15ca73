"""The parts of the NCCL transport that need no GPU: its choice, and its use of a fake group."""

import pytest
import torch

from holdfast.planning.levels import BLOCK
from holdfast.runtime.groups.abandoned_groups import GroupReaper
from holdfast.runtime.groups.commit import start_commit
from holdfast.runtime.groups.communicator import HaltedError, LocalCommunicator, PeerLostError
from holdfast.runtime.groups.rendezvous import Board
from holdfast.runtime.groups.transport_choice import build_communicator
from holdfast.runtime.groups.transports.gloo import GlooCommunicator
from holdfast.runtime.groups.transports.nccl import NcclCommunicator
from holdfast.runtime.reduction.bucket import Bucket
from tests.harness.local_world import Seat, run_world


class FakeWork:
    def __init__(self, *, ended: bool, failure: str = "") -> None:
        self.ended = ended
        self.failure = failure

    def is_completed(self) -> bool:
        return self.ended

    def wait(self) -> None:
        assert self.ended, "wait would block"
        if self.failure:
            raise RuntimeError(self.failure)


class FakeGroup:
    """Answers as ProcessGroupNCCL does; `calls` records its operations."""

    def __init__(self, work: FakeWork) -> None:
        self.work = work
        self.calls: list[str] = []
        self.devices: set[str] = set()

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 2

    def alltoall_base(self, output, source, output_splits, input_splits, options) -> FakeWork:
        self.calls.append(f"all_to_all {output_splits} {input_splits} {options.timeout.total_seconds():g}")
        return self.work

    def _allgather_base(self, output, source, options) -> FakeWork:
        self.calls.append("all_gather")
        self.devices = {output.device.type, source.device.type}
        return self.work

    def _reduce_scatter_base(self, output, source, options) -> FakeWork:
        self.calls.append(f"reduce_scatter {len(output)} of {len(source)}, {options.timeout.total_seconds():g}")
        return self.work

    def abort(self) -> None:
        self.calls.append("abort")


def communicator_of(group: FakeGroup, reaper: GroupReaper, *, halted: bool = False) -> NcclCommunicator:
    return NcclCommunicator(
        group, device=torch.device("meta"), generation=6, timeout_s=7.0, halt=lambda: halted, reaper=reaper
    )


def test_operations_are_passed_to_the_group_and_finished_after_they_end():
    group = FakeGroup(FakeWork(ended=True))
    communicator = communicator_of(group, GroupReaper())
    assert (communicator.rank, communicator.size, communicator.generation) == (1, 2, 6)
    communicator.wait(communicator.start_all_to_all(torch.zeros(2), torch.zeros(2)))
    communicator.wait(communicator.start_all_to_all(torch.zeros(3), torch.zeros(3), [1, 2], [0, 3]))
    communicator.wait(communicator.start_all_gather(torch.zeros(2), torch.zeros(1)))
    assert group.calls == ["all_to_all [] [] 7", "all_to_all [1, 2] [0, 3] 7", "all_gather"]


def test_the_commit_tensor_is_on_the_device_of_the_group():
    group = FakeGroup(FakeWork(ended=True))
    # NCCL refuses tensors in host memory.
    start_commit(communicator_of(group, GroupReaper()))
    assert group.devices == {"meta"}


def test_large_sums_use_reduce_scatter_if_several_ranks_share_a_node():
    communicator = communicator_of(FakeGroup(FakeWork(ended=True)), GroupReaper())
    communicator.size, communicator.nodes = 64, 8
    # 63 hops of 7 us against 7/8 * 7/8 of the bytes at 50 GB/s
    assert communicator.prefers_reduce_scatter(torch.zeros(8 << 20, device="meta"))
    assert not communicator.prefers_reduce_scatter(torch.zeros(1 << 20, device="meta"))
    assert not communicator.prefers_reduce_scatter(
        torch.zeros(8 << 20, device="meta", dtype=torch.bfloat16)
    )  # This dtype would be rounded at each hop.
    communicator.nodes = 64  # Here nothing is saved.
    assert not communicator.prefers_reduce_scatter(torch.zeros(1 << 40, device="meta"))
    communicator.nodes = 1  # Here no data leaves the node.
    assert not communicator.prefers_reduce_scatter(torch.zeros(1 << 40, device="meta"))


def test_a_reduce_scatter_is_one_call_per_bucket():
    group = FakeGroup(FakeWork(ended=True))
    communicator = communicator_of(group, GroupReaper())
    communicator.prefers_reduce_scatter = lambda input: True
    parameter = torch.nn.Parameter(torch.zeros(100, device="meta"))
    bucket = Bucket([parameter])
    bucket.fill_buffer(communicator)
    communicator.wait(bucket.start_sums(communicator, 0))
    assert group.calls == [f"reduce_scatter {BLOCK} of {2 * BLOCK}, 7"]


def test_a_failed_operation_raises_a_peer_lost_error():
    communicator = communicator_of(FakeGroup(FakeWork(ended=True, failure="remote error")), GroupReaper())
    with pytest.raises(PeerLostError, match="remote error"):
        communicator.wait(communicator.start_all_gather(torch.zeros(2), torch.zeros(1)))


def test_a_halted_group_is_aborted_by_the_reaper_and_unusable():
    group, reaper = FakeGroup(FakeWork(ended=False)), GroupReaper()
    communicator = communicator_of(group, reaper, halted=True)
    with pytest.raises(HaltedError):
        communicator.wait(communicator.start_all_gather(torch.zeros(2), torch.zeros(1)))
    communicator.retire()
    communicator.retire()
    assert reaper.wait_empty(60)
    assert group.calls == ["all_gather", "abort"]
    with pytest.raises(HaltedError, match="retired"):
        communicator.start_all_gather(torch.zeros(2), torch.zeros(1))
    assert reaper.close(60)


def test_a_single_rank_needs_no_transport():
    board = Board(3, lambda keys: None)
    communicator = build_communicator(torch.device("cpu"), board, 0, ["a"], generation=3, reaper=GroupReaper())
    assert isinstance(communicator, LocalCommunicator)
    assert communicator.generation == 3


def kind_body(seat: Seat) -> bool:
    communicator = seat.connect(1)
    communicator.retire(sever=False)
    return isinstance(communicator, GlooCommunicator)


def test_gloo_is_chosen_for_the_cpu():
    assert run_world(2, kind_body) == [True, True]
