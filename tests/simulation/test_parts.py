"""The simulation's own parts: time, processes, collectives, durable data and state hashes."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.coordination.generations.plan_delta import MisfitError, change_of
from holdfast.errors import EXIT_DONE, SupersededError
from holdfast.planner.fleet.timeline import URGENT, Timeline
from holdfast.protocol import events as ev
from holdfast.protocol.commit import with_flags
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.record import SCHEMA, Record
from holdfast.step_samples import StepSamples
from tests.simulation.cluster import SimCluster
from tests.simulation.collectives import Group, SimOperation
from tests.simulation.durable import SimJournal, SimStore
from tests.simulation.faults.plans import FaultPlan
from tests.simulation.faults.troubles import DataPlane
from tests.simulation.machines import training
from tests.simulation.process import Process
from tests.simulation.shared_plans import SharedPlans


def test_simultaneous_events_are_ordered_by_priority_and_then_by_insertion() -> None:
    timeline, seen = Timeline(), []
    timeline.at(1.0, seen.append, "b")
    timeline.at(1.0, seen.append, "c")
    timeline.at(1.0, seen.append, "a", priority=URGENT)
    timeline.after(0.5, seen.append, "first")
    while timeline.step():
        pass
    assert seen == ["first", "a", "b", "c"]
    assert timeline.monotonic() == timeline.time() == 1.0


def test_a_stopped_process_receives_messages_late_and_a_dead_one_none() -> None:
    process, seen = Process(), []
    process.stop()
    process.deliver(seen.append, 1)
    process.deliver(seen.append, 2)
    assert seen == []
    process.resume()
    assert seen == [1, 2]
    process.alive = False
    process.deliver(seen.append, 3)
    assert seen == [1, 2]


class Rank:
    """A member that records its results and errors."""

    def __init__(self, worker: str) -> None:
        self.id = worker
        self.values: list[Any] = []
        self.errors = 0

    def deliver(self, action: Callable[..., object], *args: Any) -> None:
        action(*args)

    def operation_done(self, operation: SimOperation, value: Any) -> None:
        self.values.append(value)

    def operation_failed(self, operation: SimOperation) -> None:
        self.errors += 1


def group_of(size: int, seed: int) -> tuple[Timeline, Group, list[Rank]]:
    timeline = Timeline()
    ranks = [Rank(f"n{index}/0/a") for index in range(size)]
    members = tuple(msg.Member(worker=rank.id, host="h", state_port=1) for rank in ranks)
    plan = msg.GenerationPlan(term=1, generation=1, members=members)
    return timeline, Group(plan, timeline, Random(seed), (0.001, 0.01), DataPlane()), ranks


def run(timeline: Timeline) -> None:
    while timeline.step():
        pass


@given(size=st.integers(1, 6), seed=st.integers(0, 1000))
def test_without_failures_all_ranks_get_the_sum(size: int, seed: int) -> None:
    timeline, group, ranks = group_of(size, seed)
    for place, rank in enumerate(ranks):
        group.issue(rank, "reduce", 1, place, sum)
    run(timeline)
    assert [rank.values for rank in ranks] == [[sum(range(size))]] * size


@given(size=st.integers(2, 6), issued=st.data(), seed=st.integers(0, 1000))
def test_an_operation_does_not_complete_before_all_members_issue_it(
    size: int, issued: st.DataObject, seed: int
) -> None:
    timeline, group, ranks = group_of(size, seed)
    missing = issued.draw(st.integers(0, size - 1))
    for place, rank in enumerate(ranks):
        if place != missing:
            group.issue(rank, "reduce", 1, 1, sum)
    group.fail(ranks[missing].id)
    run(timeline)
    assert all(rank.values == [] for rank in ranks)
    assert all(rank.errors <= 1 for rank in ranks)


def test_after_a_failure_every_subset_of_the_ready_ranks_is_seen() -> None:
    seen: set[tuple[bool, ...]] = set()
    for seed in range(200):
        timeline, group, ranks = group_of(3, seed)
        for rank in ranks:
            group.issue(rank, "commit", 1, 1, sum)
        for _ in range(seed % 3):
            timeline.step()
        group.fail(ranks[0].id)
        run(timeline)
        seen.add(tuple(bool(rank.values) for rank in ranks[1:]))
        assert all(not (rank.values and rank.errors) for rank in ranks)
    # A waiting rank may also complete: the model delivers a stalled result at random.
    assert seen <= {(a, b) for a in (False, True) for b in (False, True)}
    assert len(seen) >= 2


def test_a_stopped_member_only_delays() -> None:
    for seed in range(20):
        timeline, group, ranks = group_of(3, seed)
        for rank in ranks:
            group.issue(rank, "reduce", 1, 1, sum)
        group.stall(ranks[0].id)
        run(timeline)
        group.unstall(ranks[0].id)
        run(timeline)
        assert all(rank.values == [3] for rank in ranks)


def test_store_and_journal_are_fenced() -> None:
    store = SimStore()
    first = store.swap(Record(schema=SCHEMA, job="j", term=1), 0)
    store.swap(Record(schema=SCHEMA, job="j", term=2), first)
    with pytest.raises(SupersededError):
        store.swap(Record(schema=SCHEMA, job="j", term=1), first)
    assert store.record is not None
    assert store.record.term == 2
    journal = SimJournal()
    with pytest.raises(SupersededError):
        journal.append(None, 1)  # pyright: ignore[reportArgumentType]


def test_a_power_cut_loses_only_unsynced_data() -> None:
    record = Record(schema=SCHEMA, job="j", term=1)
    store = SimStore()
    store.swap(record, 0)
    store.power_cut()
    assert (store.version, store.record) == (1, record)
    left: set[int] = set()
    for seed in range(50):
        journal = SimJournal()
        for seq in range(1, 6):
            journal.append(
                ev.JobWaiting(time=0.0, job="j", term=1, generation=0, seq=seq, nodes=1, expert_slots=0, why=""),
                seq - 1,
            )
            if seq == 3:
                journal.sync()
        journal.power_cut(Random(seed))
        assert [event.seq for event in journal.events] == list(range(1, len(journal.events) + 1))
        left.add(len(journal.events))
    assert left == {3, 4, 5}


def test_emulated_processor_time_delays_the_coordinator() -> None:
    def ends_after(**costs: float) -> float:
        outcome = SimCluster(FaultPlan(seed=3, nodes=8, start_nodes=8, start_spread=0.0, **costs)).run()
        assert outcome.exit_code == EXIT_DONE
        return outcome.time

    at_once = ends_after()
    assert ends_after(handle_s=0.02) > at_once + 0.2
    assert ends_after(send_s=0.02) > at_once + 0.2


def test_agents_share_plans_with_equal_inputs() -> None:
    members = tuple(msg.Member(worker=f"n{number}/0/a", host="h", state_port=1) for number in range(3))
    base = msg.GenerationPlan(term=1, generation=1, members=members)
    next_one = msg.GenerationPlan(term=1, generation=2, members=members[1:])
    whole, change = change_of(base, None), change_of(next_one, base)
    plans = SharedPlans()
    known = plans.build_plan(whole, None)
    assert known == base
    assert plans.build_plan(whole, None) is known
    assert plans.build_plan(change, known) is plans.build_plan(change, known) == next_one
    assert plans.build_plan(change_of(base, None), None) is not known
    with pytest.raises(MisfitError):
        plans.build_plan(change, None)


def test_every_wrong_gradient_leads_to_another_state() -> None:
    state = training.initial_state(1)
    samples = StepSamples(seed=0, micro_batches=4, micro_batch=4)
    parts = [training.SimGradient(training.gradient(state, 1, m), samples.hash_of(1, m)) for m in range(4)]
    plan = FaultPlan(seed=0)
    (right,) = training.reduce_parts([parts[:2], parts[2:]], plan, generation=1)
    assert right.parts == training.expected_parts(state, 1, 4)

    def vote(*flags: msg.Flag) -> list[float]:
        machine: Any = SimpleNamespace(generations=SimpleNamespace(rank=0, world=2, flags=flags))
        machine.step, machine.wishes = 1, SimpleNamespace(raised=())
        return training.vote(plan, machine, still_saving=False)

    v = with_flags(right.v, training.combine([vote(), vote(msg.Flag.SWAP)]), 2)
    assert (v.samples, v.flags, v.sample_hashes) == (16, (), samples.expected(1))
    good = training.next_state(state, right, v)
    (doubled,) = training.reduce_parts([parts, parts[2:]], plan, generation=1)
    (lost,) = training.reduce_parts([parts[:2]], plan, generation=1)
    (elsewhere,) = training.reduce_parts([parts[:2], parts[2:]], plan, generation=2)
    other_v = msg.Commit(grad_square=0.0, loss_sum=v.loss_sum, samples=16, nonfinite=0)
    wrong = {
        *(training.next_state(state, reduced, v) for reduced in (doubled, lost, elsewhere)),
        training.next_state(state, right, other_v),
        training.next_state(state + 1, right, v),
    }
    assert len(wrong) == 5
    assert good not in wrong
