"""Waiting that completes, is halted, or fails; and the world of one."""

import gc
import threading
import weakref

import pytest
import torch
from thread_world import run_threads

from holdfast.runtime.groups.communicator import Communicator, HaltedError, LocalCommunicator, PeerLostError, Pending


class FakeOperation:
    """An operation that completes after some polls."""

    def __init__(self, looks: int, *, failure: str = "", at_look=None) -> None:
        self.looks = looks
        self.failure = failure
        self.at_look = at_look or {}
        self.finished = 0

    def done(self) -> bool:
        self.looks -= 1
        self.at_look.get(self.looks, lambda: None)()
        return self.looks < 0

    def sleep(self, seconds: float) -> None:
        assert seconds > 0

    def finish(self) -> None:
        self.finished += 1
        if self.failure:
            raise RuntimeError(self.failure)


def test_wait_returns_once_the_operation_has_ended():
    operation = FakeOperation(10)
    pending = Pending("all_gather", operation, (torch.zeros(1),))
    communicator = LocalCommunicator()
    communicator.wait(pending)
    assert operation.looks < 0
    assert operation.finished == 1
    communicator.wait(pending)
    assert operation.finished == 1, "the operation must finish only once"
    assert pending.tensors == ()


def test_wait_raises_when_halted():
    halt = threading.Event()
    operation = FakeOperation(1 << 30, at_look={(1 << 30) - 20: halt.set})
    with pytest.raises(HaltedError, match="generation 7 was halted in commit"):
        LocalCommunicator(generation=7, halt=halt).wait(Pending("commit", operation))
    assert operation.finished == 0


def test_a_completed_operation_counts_even_when_halted():
    halt = threading.Event()
    halt.set()
    operation = FakeOperation(0)
    LocalCommunicator(halt=halt).wait(Pending("commit", operation))
    assert operation.finished == 1


def test_an_operation_that_completes_during_a_halt_counts():
    halt = threading.Event()
    halt.set()
    operation = FakeOperation(1)  # It is not done at the first poll, but at the second.
    LocalCommunicator(halt=halt).wait(Pending("commit", operation))
    assert operation.finished == 1


def test_a_failure_names_operation_generation_and_first_error_line():
    operation = FakeOperation(0, failure="Connection closed by peer\nand a long story")
    with pytest.raises(PeerLostError, match=r"all_to_all in generation 3 failed: Connection closed by peer$"):
        LocalCommunicator(generation=3).wait(Pending("all_to_all", operation))


@pytest.mark.parametrize("failure", ["", "reset"])
def test_the_exception_does_not_keep_the_operation_alive(failure: str):
    # Any reference to a dead group keeps its sockets open, even one in a traceback.
    operation = FakeOperation(0 if failure else 1 << 30, failure=failure)
    gone = weakref.ref(operation)
    pending = Pending("all_to_all", operation)
    del operation
    with pytest.raises((HaltedError, PeerLostError)) as caught:
        LocalCommunicator(halt=lambda: True).wait(pending)
    pending.detach()
    gc.collect()
    assert gone() is None
    assert caught.value.__traceback__ is not None


def test_a_detached_operation_of_a_retired_group_counts_as_failed():
    pending = Pending("commit", FakeOperation(1 << 30))
    taken = pending.detach()
    assert not taken.done()
    with pytest.raises(PeerLostError, match="retired"):
        LocalCommunicator().wait(pending)


def test_collectives_of_a_single_rank_copy():
    communicator = LocalCommunicator(generation=2)
    source, output = torch.arange(5.0), torch.zeros(5)
    communicator.wait(communicator.start_all_to_all(output, source))
    assert output.equal(source)
    output = torch.zeros(5)
    communicator.wait(communicator.start_all_to_all(output, source, [5], [5]))
    assert output.equal(source)
    gathered = torch.zeros(5)
    communicator.wait(communicator.start_all_gather(gathered, source))
    assert gathered.equal(source)
    communicator.wait(communicator.start_all_gather(gathered, gathered))
    assert gathered.equal(source)
    communicator.wait(communicator.start_broadcast(gathered, 0))
    assert gathered.equal(source)
    for start in (communicator.start_send, communicator.start_receive):
        with pytest.raises(NotImplementedError, match="one rank alone"):
            start(source, 0)
    communicator.sever()
    communicator.retire()


def broadcast(all_levels: Communicator) -> list[float]:
    comm = all_levels.groups[0]
    tensors = [torch.full((2, 3), float(comm.rank)) for _ in range(comm.size)]
    for pending in [comm.start_broadcast(tensor, root) for root, tensor in enumerate(tensors)]:
        comm.wait(pending)
    return [tensor.sum().item() for tensor in tensors]


def test_a_broadcast_works_over_an_all_to_all():
    got = run_threads(["a", "b", "c"], broadcast, seed=1, flat_up_to=8, fan_out=8)
    assert got == [[0.0, 6.0, 12.0]] * 3


@pytest.mark.parametrize(("rank", "size"), [(1, 1), (-1, 4), (4, 4), (0, 0)])
def test_a_rank_outside_the_world_is_refused(rank: int, size: int):
    with pytest.raises(ValueError, match="outside a world"):
        Communicator(rank=rank, size=size)
