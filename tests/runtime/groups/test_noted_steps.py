"""Notes of micro-batches: every rank has all of them, in order, before a step passes, whichever rank computed them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from thread_rank import MICRO_BATCHES, Rank
from thread_world import run_threads

from holdfast.coordination.worker.tasks import Compute
from holdfast.protocol.plan import Phase
from holdfast.runtime.faults.orders import Faults
from holdfast.runtime.groups.communicator import Communicator
from holdfast.runtime.micro_batch_notes import NoteSource
from holdfast.runtime.session.attempt import Attempt

ALL = [f"2/{number}".encode() for number in range(MICRO_BATCHES)]


class Names(NoteSource):
    """Notes step and number of each micro-batch from `first` on, and records its calls."""

    def __init__(self, first: int = 1, own: bytes = b"") -> None:
        self.first, self.own = first, own
        self.at: tuple[int, int] | None = None
        self.calls: list[str] = []
        self.taken: list[tuple[list[bytes], list[bytes]]] = []
        self.applied: list[int] = []

    def on_attempt_start(self) -> None:
        self.calls.append("restart")

    def on_micro_batch_start(self, step: int, micro_batch: int) -> None:
        self.at = (step, micro_batch)
        self.calls.append("begin")

    def on_forward_done(self) -> None:
        self.calls.append("computed")

    def make_note(self) -> bytes:
        assert self.at is not None
        self.calls.append("note")
        step, micro_batch = self.at
        return f"{step}/{micro_batch}".encode() if step >= self.first else b""

    def make_rank_note(self) -> bytes:
        return self.own

    def merge(self, notes: Sequence[bytes], of_ranks: Sequence[bytes]) -> None:
        self.taken.append((list(notes), list(of_ranks)))

    def apply(self) -> None:
        self.applied.append(len(self.taken))


@pytest.mark.parametrize("workers", range(1, 5))
@pytest.mark.parametrize("flat_up_to", [1, 8])
def test_all_ranks_receive_all_notes_in_order(workers: int, flat_up_to: int) -> None:
    def body(comm: Communicator) -> Names:
        names = Names(first=2, own=b"" if comm.rank else b"first")
        silent = NoteSource()
        rank = Rank(comm, noted=[silent, names])
        names.own = b""
        assert rank.step()
        names.own = b"" if comm.rank else b"first"
        assert rank.step()
        assert rank.applied == [1, 2]
        share = len(rank.workload.sums.notes)
        assert names.calls == ["restart", *["begin", "computed", "note"] * share] * 2
        return names

    nodes = [f"n{number}" for number in range(workers)]
    for names in run_threads(nodes, body, seed=workers, flat_up_to=flat_up_to, fan_out=2):
        own = [b"first"] + [b""] * (workers - 1)
        assert names.taken == [([b""] * MICRO_BATCHES, [b""]), (ALL, own)]
        assert names.applied == [1, 2], "notes must be taken before the step passes, and applied once, in apply"


def test_all_ranks_gather_notes_if_one_rank_has_some() -> None:
    def body(comm: Communicator) -> Names:
        names = Names(first=99, own=b"me" if comm.rank == 1 else b"")
        assert Rank(comm, noted=[names]).step()
        return names

    for names in run_threads(["a", "b", "c"], body, seed=3, flat_up_to=8, fan_out=3):
        assert names.taken == [([b""] * MICRO_BATCHES, [b"", b"me", b""])]


def test_kept_micro_batches_keep_their_notes() -> None:
    """The attempt after an aborted one continues from its sums and their notes."""

    def body(comm: Communicator) -> Names:
        names = Names()
        rank = Rank(comm, noted=[names])
        kept = rank.machine.share[:2]
        first = Attempt(rank.shared, rank.workload, Faults(lambda: None), rank.apply, Compute(1, kept, ()), 1)
        for number in first.micro_batches():
            rank.compute(first, number)
        task = Compute(1, rank.machine.share, kept)
        second = Attempt(rank.shared, rank.workload, Faults(lambda: None), rank.apply, task, 1)
        for number in second.micro_batches():
            rank.compute(second, number)
        assert second.commit()
        return names

    expected = [f"1/{number}".encode() for number in range(MICRO_BATCHES)]
    for names in run_threads(["a", "b"], body, seed=1, flat_up_to=8, fan_out=3):
        assert names.taken == [(expected, [b"", b""])]


def test_a_new_attempt_restarts_its_note_sources() -> None:
    """Otherwise a value logged in the attempt before would count again."""

    def body(comm: Communicator) -> Names:
        names = Names()
        rank = Rank(comm, noted=[names])
        kept = rank.machine.share[:2]
        for task in (Compute(1, kept, ()), Compute(1, rank.machine.share, kept)):
            attempt = Attempt(rank.shared, rank.workload, Faults(lambda: None), rank.apply, task, 1)
            rank.workload.logged.log({"seen": 1.0}, "sum")
            for number in attempt.micro_batches():
                rank.compute(attempt, number)
        assert attempt.commit()
        assert rank.workload.logged.metrics == {"seen": 2.0}, "the value must count once for each rank"
        return names

    for names in run_threads(["a", "b"], body, seed=1, flat_up_to=8, fan_out=3):
        assert [number for number, call in enumerate(names.calls) if call == "restart"] == [0, 7]


@pytest.mark.parametrize("wrong", ["missing", "twice"])
def test_every_rank_refuses_a_step_with_missing_or_surplus_notes(wrong: str) -> None:
    def body(comm: Communicator) -> Rank:
        rank = Rank(comm, noted=[Names()])
        attempt = Attempt(rank.shared, rank.workload, Faults(lambda: None), rank.apply, _task(rank), 1)
        for number in attempt.micro_batches():
            rank.compute(attempt, number)
        if comm.rank == 1 and wrong == "missing":
            rank.workload.sums.notes.popitem()
        elif comm.rank == 1:
            rank.workload.sums.notes[0] = (b"1/0",)
        assert not attempt.commit()
        return rank

    ranks = run_threads(["a", "b"], body, seed=1, flat_up_to=8, fan_out=3)
    assert [rank.machine.phase for rank in ranks] == [Phase.REFUSED] * 2
    assert [rank.applied for rank in ranks] == [[], []]


def _task(rank: Rank) -> Compute:
    task = rank.machine.task
    assert isinstance(task, Compute)
    return task
