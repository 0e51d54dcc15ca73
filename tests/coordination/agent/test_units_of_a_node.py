"""Tests of replica groups on a node: formed by workers with equal layouts, and either complete or absent."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.coordination.agent.identity import NodeIdentity
from holdfast.coordination.agent.instructions import (
    AgentInstruction,
    KillHung,
    SendToCoordinator,
    SendToWorkers,
    StartWorker,
)
from holdfast.coordination.agent.machine import AgentMachine
from holdfast.coordination.agent.replica_groups.refusals import describe_misfit
from holdfast.errors import EXIT_BAD_INPUT
from holdfast.protocol.failures import FailureKind
from holdfast.protocol.job_spec import MAX_RESTARTS
from holdfast.protocol.layouts.group_messages import (
    JoinUnit,
    UnitAnswer,
    UnitAwaits,
    UnitFormed,
    UnitPost,
    UnitPosted,
    UnitRefused,
)
from holdfast.protocol.layouts.layout import WHOLE, Layout
from holdfast.protocol.layouts.layout_list import ListedLayout
from holdfast.protocol.messages.agent import Refused, Replace, ToWorker, Welcome, WorkerDown
from holdfast.protocol.messages.orders import JobDone, Warm
from holdfast.protocol.messages.worker import Attach, Raised, ScriptError
from holdfast.protocol.names import MAX_KEY_BYTES, index_of

TWO, FOUR = Layout(shard=2), Layout(shard=2, tensor=2)


class Node:
    """A connected agent's state machine and the messages to its workers."""

    def __init__(self, workers: int) -> None:
        numbers = itertools.count(1)
        node = NodeIdentity(job="job", node="node-0", workers=workers, digest="d", agent_pid=7)
        self.machine = AgentMachine(node, lambda: f"{next(numbers):08x}")
        self.now = 0.0
        self.machine.start()
        self.machine.on_connected(self.now)
        self.machine.on_message(Welcome(term=1, lease_s=1.0, heartbeat_s=0.1, committed=0), self.now)

    @property
    def workers(self) -> list[str]:
        return list(self.machine.workers)

    def join(self, index: int, layout: Layout = TWO) -> list[tuple[list[int], UnitAnswer]]:
        out = self.machine.on_worker_message(JoinUnit(worker=self.workers[index], layout=layout), self.now)
        return passed(out)

    def join_all(self, layout: Layout = TWO) -> list[UnitFormed]:
        answers = [answer for index in range(len(self.workers)) for answer in self.join(index, layout)]
        return [answer for _, answer in answers if isinstance(answer, UnitFormed)]

    def attach(self, index: int) -> list[AgentInstruction]:
        message = Attach(
            worker=self.workers[index], pid=1, host="h", state_port=1, config={}, global_batch=8, micro_batches=4
        )
        return self.machine.on_worker_message(message, self.now)

    def die(self, worker: str, exit_code: int = -9, *, final: bool = False) -> list[AgentInstruction]:
        return self.machine.on_worker_ended(down(worker, exit_code, final=final), self.now, clean=exit_code == 0)

    def raised(self, index: int) -> None:
        error = ScriptError(place="ValueError")
        worker = self.workers[index]
        self.machine.on_worker_message(
            Raised(worker=worker, generation=1, detail="x", error=error, exit_code=1), self.now
        )


def down(worker: str, exit_code: int = -9, *, final: bool = False) -> WorkerDown:
    kind = FailureKind.PROCESS_EXIT
    return WorkerDown(worker=worker, kind=kind, detail="gone", exit_code=exit_code, final=final)


def passed(out: list[AgentInstruction]) -> list[tuple[list[int], UnitAnswer]]:
    return [
        ([index_of(worker) for worker in one.workers], one.order)
        for one in out
        if isinstance(one, SendToWorkers) and isinstance(one.order, UnitAnswer)
    ]


def reported_ends(out: list[AgentInstruction]) -> list[WorkerDown]:
    return [one.message for one in out if isinstance(one, SendToCoordinator) and isinstance(one.message, WorkerDown)]


def started(out: list[AgentInstruction]) -> list[int]:
    return [index_of(one.worker) for one in out if isinstance(one, StartWorker)]


def killed(out: list[AgentInstruction]) -> list[str]:
    return [one.worker for one in out if isinstance(one, KillHung)]


# ---- forming ----


def test_a_replica_group_is_formed_once_all_its_workers_have_joined() -> None:
    node = Node(4)
    assert node.join(1) == [([1], UnitAwaits(missing=(0,)))]
    assert node.join(2) == [([2], UnitAwaits(missing=(3,)))]
    ((places, formed),) = node.join(0)
    assert places == [0, 1]
    assert isinstance(formed, UnitFormed)
    assert list(formed.workers) == node.workers[:2]
    ((places, other),) = node.join(3)
    assert places == [2, 3]
    assert isinstance(other, UnitFormed)
    assert other.unit != formed.unit


def test_all_joined_workers_are_sent_the_missing_local_ranks() -> None:
    node = Node(4)
    node.join(3, FOUR)
    assert node.join(1, FOUR) == [([1, 3], UnitAwaits(missing=(0, 2)))]


@pytest.mark.parametrize(
    ("layout", "workers", "words"),
    [
        (FOUR, 3, ["shard 2 x tensor 2 takes 4 workers per node", "this job has 3", "--workers-per-node 4, or"]),
        (TWO, 1, ["shard 2 takes 2 workers per node", "this job has 1", "--workers-per-node 2"]),
        (Layout(tensor=3), 4, ["tensor 3 takes 3", "this job has 4", "--workers-per-node 6"]),
    ],
)
def test_a_layout_that_does_not_fit_the_workers_of_a_node_is_refused(
    layout: Layout, workers: int, words: list[str]
) -> None:
    node = Node(workers)
    for index in range(workers):
        ((places, answer),) = node.join(index, layout)
        assert places == [index]
        assert isinstance(answer, UnitRefused)
        assert [word for word in words if word not in answer.why] == []


def test_layouts_that_fit_four_workers_have_no_misfit() -> None:
    assert [describe_misfit(layout, 4) for layout in (TWO, FOUR, Layout(tensor=4))] == ["", "", ""]


def test_workers_that_request_different_layouts_are_both_refused() -> None:
    node = Node(4)
    node.join(0, TWO)
    ((places, answer),) = node.join(1, Layout(tensor=2))
    assert places == [0, 1]
    assert isinstance(answer, UnitRefused)
    assert "worker 1 of this node asks for tensor 2, worker 0 for shard 2" in answer.why


def test_a_formed_replica_group_stays_if_another_layout_is_refused() -> None:
    node = Node(4)
    node.join(0), node.join(1)
    ((places, answer),) = node.join(2, Layout(tensor=2))
    assert (places, type(answer)) == ([2], UnitRefused)
    assert node.machine.units.group_mates(node.workers[0]) == (1,)


@pytest.mark.parametrize("first", [True, False])
def test_a_replica_group_with_a_worker_without_a_layout_is_refused(first: bool) -> None:
    node = Node(2)
    if first:
        node.attach(0)
        ((places, answer),) = node.join(1)
    else:
        node.join(1)
        ((places, answer),) = passed(node.attach(0))
    assert places == [1]
    assert isinstance(answer, UnitRefused)
    assert "no layout" in answer.why


def test_a_process_that_joins_its_replica_group_twice_is_refused() -> None:
    node = Node(2)
    node.join(0)
    ((_, answer),) = node.join(0)
    assert isinstance(answer, UnitRefused)
    assert "twice" in answer.why


def test_a_process_that_dies_before_it_joined_is_restarted_alone() -> None:
    node = Node(2)
    node.join(0)
    assert started(node.die(node.workers[1])) == [1]
    ((places, answer),) = node.join(1)
    assert (places, type(answer)) == ([0, 1], UnitFormed)


def test_a_worker_that_does_not_join_in_time_is_killed_and_named() -> None:
    node = Node(4)
    node.join(2)
    limit = node.machine.units.join_timeout_s
    assert killed(node.machine.tick(limit, ())) == []
    (late,) = [one for one in node.machine.tick(limit + 1, ()) if isinstance(one, KillHung)]
    assert late.worker == node.workers[3]
    assert "rank 1 of a replica group (worker 3 of the node) did not come to holdfast.init() within 600 s" in late.why
    node.now = limit + 2
    node.die(late.worker)
    assert killed(node.machine.tick(node.now, ())) == []  # its successor has the full time
    assert killed(node.machine.tick(node.now + limit, ())) == []
    assert killed(node.machine.tick(node.now + limit + 1, ())) == [node.workers[3]]


# ---- keys ----


def test_keys_are_sent_only_to_the_other_workers_of_the_replica_group() -> None:
    node = Node(4)
    first, second = node.join_all()
    post = UnitPost(worker=node.workers[3], unit=second.unit, keys={"1:a": b"x"})
    assert passed(node.machine.on_worker_message(post, 0.0)) == [
        ([2], UnitPosted(unit=second.unit, keys={"1:a": b"x"}))
    ]
    mixed = UnitPost(worker=node.workers[3], unit=first.unit, keys={"1:a": b"x"})
    assert node.machine.on_worker_message(mixed, 0.0) == []


def test_keys_of_an_earlier_replica_group_are_dropped() -> None:
    node = Node(2)
    (before,) = node.join_all()
    old = node.workers[0]
    node.die(node.workers[1])
    (after,) = node.join_all()
    assert after.unit != before.unit
    assert node.machine.on_worker_message(UnitPost(worker=old, unit=before.unit, keys={"0:a": b"x"}), 0.0) == []
    late = UnitPost(worker=node.workers[0], unit=before.unit, keys={"0:a": b"x"})
    assert node.machine.on_worker_message(late, 0.0) == []


@pytest.mark.parametrize("keys", [{"1:a": b"x"}, {"0:a": bytes(MAX_KEY_BYTES), "0:b": bytes(MAX_KEY_BYTES)}])
def test_a_worker_that_posts_forbidden_keys_is_killed(keys: dict[str, bytes]) -> None:
    node = Node(2)
    (unit,) = node.join_all()
    post = UnitPost(worker=node.workers[0], unit=unit.unit, keys=keys)
    assert killed(node.machine.on_worker_message(post, 0.0)) == [node.workers[0]]


# ---- the end of a replica group ----


def test_if_one_worker_ends_only_its_replica_group_is_restarted() -> None:
    node = Node(4)
    node.join_all()
    before = node.workers
    out = node.die(before[1])
    assert [each.worker for each in reported_ends(out)] == [before[1], before[0]]
    assert reported_ends(out)[0] == down(before[1])
    assert before[1] in reported_ends(out)[1].detail
    assert sorted(started(out)) == [0, 1]
    assert node.workers[2:] == before[2:]
    assert not set(node.workers[:2]) & set(before)
    assert node.die(before[0]) == []  # the agent killed it itself


def test_workers_restarted_with_a_failed_one_do_not_count_as_restarts() -> None:
    node = Node(2)
    for _ in range(MAX_RESTARTS):
        node.join_all()
        assert sorted(started(node.die(node.workers[0]))) == [0, 1]


def test_a_replica_group_with_a_script_error_is_replaced_on_order() -> None:
    node = Node(2)
    node.join_all()
    old = node.workers
    node.raised(0)
    out = node.machine.on_message(Replace(worker=old[0]), node.now)
    assert [each.worker for each in reported_ends(out)] == [
        old[1]
    ]  # the coordinator already knows about the first worker
    assert sorted(started(out)) == [0, 1]
    assert node.machine.on_message(Replace(worker=old[1]), node.now) == []


def test_a_replica_group_with_an_unrestartable_worker_is_killed() -> None:
    node = Node(2)
    node.join_all()
    old = node.workers
    out = node.die(old[0], EXIT_BAD_INPUT)
    assert [each.worker for each in reported_ends(out)] == old
    assert (killed(out), started(out)) == ([old[1]], [])
    assert node.workers == ["", ""]
    assert node.die(old[1]) == []


def test_a_worker_that_left_its_loop_does_not_end_its_replica_group() -> None:
    node = Node(2)
    node.join_all()
    old = node.workers
    assert started(node.die(old[0], 0, final=True)) == []
    assert node.workers == ["", old[1]]


def test_a_worker_that_left_its_loop_is_restarted_if_its_peer_dies() -> None:
    node = Node(2)
    node.join_all()
    old = node.workers
    node.die(old[0], 0, final=True)
    out = node.die(old[1])
    assert [each.worker for each in reported_ends(out)] == [old[1], old[0]]
    assert sorted(started(out)) == [0, 1]


@pytest.mark.parametrize("exit_code", [0, EXIT_BAD_INPUT])
def test_a_replica_group_is_not_formed_with_a_permanently_ended_worker(exit_code: int) -> None:
    node = Node(2)
    node.join(0)
    node.die(node.workers[0], exit_code, final=True)
    assert node.join(1) == [([1], UnitAwaits(missing=(0,)))]


def test_workers_of_a_replica_group_end_independently_after_the_job_is_done() -> None:
    node = Node(2)
    node.join_all()
    for index in range(2):
        node.attach(index)
    node.machine.on_message(JobDone(), node.now)
    assert reported_ends(node.die(node.workers[0], 0)) == []
    assert reported_ends(node.die(node.workers[1], 0)) == []
    assert node.machine.over is not None


def test_a_failed_warm_up_is_reported_for_all_workers_of_a_replica_group() -> None:
    node = Node(2)
    node.join_all()
    for index, worker in enumerate(node.workers):
        node.attach(index)
        node.machine.on_message(ToWorker(worker=worker, order=Warm(term=1)), node.now)
    out = node.die(node.workers[0])
    kinds = [
        type(getattr(one.message, "message", one.message)).__name__ for one in out if isinstance(one, SendToCoordinator)
    ]
    assert kinds == ["Warmed", "WorkerDown", "Warmed", "WorkerDown"]


def test_ends_of_all_workers_of_a_replica_group_are_replayed_on_reconnection() -> None:
    node = Node(2)
    node.join_all()
    old = node.workers
    node.machine.on_disconnected()
    node.die(old[0])
    (hello,) = [one.message for one in node.machine.on_connected(0.0) if isinstance(one, SendToCoordinator)]
    assert sorted(kept.worker for kept in hello.kept if isinstance(kept, WorkerDown)) == old


@settings(max_examples=300, deadline=None)
@given(
    layout=st.sampled_from([TWO, FOUR]),
    events=st.lists(st.tuples(st.sampled_from(["join", "die", "break", "raise", "replace"]), st.integers(0, 3))),
)
def test_a_replica_group_is_complete_or_absent(layout: Layout, events: list[tuple[str, int]]) -> None:
    """For any events in any order, no worker is in two replica groups and all of a group end together.

    Each end is reported once.
    """
    node, units = Node(4), {}
    dead: list[str] = []
    for event, index in events:
        worker = node.workers[index]
        if not worker or node.machine.over is not None:
            continue
        before = node.workers
        mates = [before[mate] for mate in node.machine.units.group_mates(worker)]
        if event == "join":
            for places, answer in node.join(index, layout):
                if isinstance(answer, UnitFormed):
                    assert [node.workers[place] for place in places] == list(answer.workers)
                    assert len(places) == layout.places
                    assert places[0] % layout.places == 0
                    assert answer.unit not in units
                    units[answer.unit] = answer.workers
            continue
        if event == "raise":
            node.raised(index)
            continue
        if event == "replace":
            out = node.machine.on_message(Replace(worker=worker), node.now)
        else:
            out = node.die(worker, 0 if event == "break" else -9, final=event == "break")
        dead += [each.worker for each in reported_ends(out) if not each.has_left_loop]
        replaced = started(out)
        if replaced:
            assert all(mate not in node.workers for mate in mates if mate)
            assert set(replaced) >= {index, *(index_of(mate) for mate in mates if mate)}
        assert [one for one in node.workers if one in dead] == []
    assert len(dead) == len(set(dead))


# ---- several layouts ----

LISTED = tuple(ListedLayout(layout=layout) for layout in (TWO, FOUR, WHOLE))


@pytest.mark.parametrize(("before", "after"), list(itertools.permutations((TWO, FOUR, WHOLE), 2)), ids=str)
@pytest.mark.parametrize("early", [1, 2, 3])
def test_the_layout_changes_before_all_workers_of_a_node_have_joined(before: Layout, after: Layout, early: int) -> None:
    """A coordinator takes over meanwhile. Workers grouped under the old layout are replaced once they attach."""
    node = Node(4)

    def comes(index: int) -> list[AgentInstruction]:
        return node.machine.on_worker_message(JoinUnit(worker=node.workers[index], layouts=LISTED), node.now)

    def connect(layout: Layout) -> list[AgentInstruction]:
        node.machine.on_connected(node.now)
        welcome = Welcome(term=1, lease_s=1.0, heartbeat_s=0.1, committed=0, layout=layout)
        return node.machine.on_message(welcome, node.now)

    node.machine.on_disconnected()
    said = [*connect(before), *(one for index in range(early) for one in comes(index))]
    node.machine.on_disconnected()
    said += [*connect(after), *(one for index in range(early, 4) for one in comes(index))]
    formed = [answer for _, answer in passed(said) if isinstance(answer, UnitFormed)]
    assert [answer for _, answer in passed(said) if isinstance(answer, UnitRefused)] == []
    met = {worker for unit in formed for worker in unit.workers}
    assert len(met) == sum(len(unit.workers) for unit in formed), "no worker is in two replica groups"
    assert {unit.layout for unit in formed} <= {before, after}
    assert all(len(unit.workers) == unit.layout.places for unit in formed)
    if all(unit.layout == after for unit in formed):
        assert met == set(node.workers), "no worker waits for one that never arrives"
    node.machine.on_message(Refused(why="another layout", exit_code=0, retry=True), node.now)
    anew = [*connect(after), *(one for index in range(4) for one in comes(index))]
    last = [answer for _, answer in passed(anew) if isinstance(answer, UnitFormed)]
    assert sorted(worker for unit in last for worker in unit.workers) == sorted(node.workers)
    assert {unit.layout for unit in last} == {after}
