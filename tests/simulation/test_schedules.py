"""Fault schedules of all families, with every invariant checked after every event.

A failed schedule prints the command that replays it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable

import pytest

from holdfast.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED
from tests.simulation.cluster import Outcome, SimCluster, run_plan
from tests.simulation.families.corrupt_plans import corrupt_plan
from tests.simulation.families.differ_plans import differ_plan
from tests.simulation.families.ladder_plans import ladder_plan
from tests.simulation.families.large_plans import large_plan
from tests.simulation.families.link_plans import link_plan
from tests.simulation.families.membership_plans import leaving_plan, move_plan, notice_plan, standby_plan
from tests.simulation.families.memory_plans import memory_plan
from tests.simulation.families.newcomer_plans import newcomer_plan
from tests.simulation.families.outdated_plans import outdated_plan
from tests.simulation.families.script_plans import raising_plan
from tests.simulation.families.storm_plans import storm_plan
from tests.simulation.families.witness_plans import witness_plan
from tests.simulation.families.work_plans import straggler_plan
from tests.simulation.faults.plans import FaultKind, interrupted_plan, lively_plan, random_plan, slow_plan, wide_plan
from tests.simulation.schedules.enumeration import (
    FIRST_BASELINE_SEED,
    FIRST_BEGINNING_SEED,
    FIRST_INTERRUPTED_SEED,
    FIRST_LARGE_SEED,
    FIRST_LEVEL_SEED,
    FIRST_LIVELY_SEED,
    FIRST_OUTDATED_SEED,
    FIRST_POWER_SEED,
    FIRST_SEED,
    FIRST_SLOW_SEED,
    FIRST_WIDE_SEED,
    FIRSTS,
    RANKS,
    SCHEDULES,
    SECONDS,
    WRITES,
    Schedule,
    plan_of,
)
from tests.simulation.schedules.every_write import killed_at_every_write, one_failure
from tests.simulation.schedules.fuzzing import Tally

# `make soak` runs many more schedules.
RANDOM_SCHEDULES = 240
CHUNKS = 4
BASELINE_SCHEDULES = 60
WIDE_SCHEDULES = 80
LIVELY_SCHEDULES = 60
POWER_SCHEDULES = 60
INTERRUPTED_SCHEDULES = 60
SLOW_SCHEDULES = 60
LEVEL_SCHEDULES = 30
#: The CPU time for jobs of 33 to 128 nodes, in seconds; each takes as long as 50 small jobs.
LARGE_S = 3.0


def run_all(seeds: Iterable[int]) -> list[Outcome]:
    """Run schedules; the first failure has its replay command."""
    outcomes: list[Outcome] = []
    for seed in seeds:
        try:
            outcomes.append(run_plan(plan_of(seed)))
        except Exception as error:
            raise AssertionError(f"schedule {seed} failed: python -m tests.simulation replay {seed}") from error
    return outcomes


def test_a_script_that_never_reaches_its_loop_fails_the_job() -> None:
    """No node is quarantined (`wronged` in faults/ends.py), and the job ends with the exception in its reason."""
    numbers = range(FIRST_BEGINNING_SEED, FIRST_BEGINNING_SEED + 100)
    calm = [number for number in numbers if not plan_of(number).faults and not plan_of(number).crashes]
    assert len(calm) > 20
    for outcome in run_all(calm):
        assert (outcome.exit_code, "Oops" in outcome.why) == (EXIT_FAILED, True), outcome


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_schedules(chunk: int) -> None:
    outcomes = run_all(range(chunk, RANDOM_SCHEDULES, CHUNKS))
    assert len(outcomes) == RANDOM_SCHEDULES // CHUNKS
    assert {outcome.exit_code for outcome in outcomes} == {EXIT_DONE, EXIT_FAILED}
    failed = [outcome for outcome in outcomes if outcome.exit_code == EXIT_FAILED]
    # The second reason is from a coordinator that took over after the job had failed.
    assert all("no live copy" in outcome.why or outcome.why == "the job is failed" for outcome in failed)


@pytest.mark.parametrize("chunk", range(4))
def test_random_schedules_of_baselines(chunk: int) -> None:
    """Worlds of multiples of a size, full restarts at every change, and both together."""
    seeds = range(FIRST_BASELINE_SEED + chunk, FIRST_BASELINE_SEED + BASELINE_SCHEDULES, 4)
    for seed, outcome in zip(seeds, run_all(seeds), strict=True):
        # A job that restarts without a checkpoint starts from the beginning, so it never fails.
        assert outcome.exit_code == EXIT_DONE or not plan_of(seed).restart


@pytest.mark.parametrize("chunk", range(4))
def test_random_schedules_with_troubles(chunk: int) -> None:
    """Faults without dead processes: late messages, temporary partitions, hangs and disk faults."""
    run_all(range(FIRST_WIDE_SEED + chunk, FIRST_WIDE_SEED + WIDE_SCHEDULES, 4))


@pytest.mark.parametrize("chunk", range(2))
def test_random_schedules_with_a_lasting_fault(chunk: int) -> None:
    """After a permanent partition or a hung thread the job continues without the node, or reports why it ends."""
    outcomes = run_all(range(FIRST_LIVELY_SEED + chunk, FIRST_LIVELY_SEED + LIVELY_SCHEDULES, 2))
    assert sum(outcome.exit_code == EXIT_DONE for outcome in outcomes) > 0.95 * len(outcomes)


@pytest.mark.parametrize("first", range(len(FIRSTS)))
def test_one_failure_and_a_crash_at_every_write(first: int) -> None:
    start = first * len(SECONDS) * (WRITES + 1)
    outcomes = run_all(FIRST_SEED + start + write for write in range(WRITES + 1))
    assert all(outcome.exit_code == EXIT_DONE for outcome in outcomes)


@pytest.mark.parametrize("first", range(len(FIRSTS)))
def test_two_failures_and_a_crash(first: int) -> None:
    """Every pair of failures on two of the six pairs of ranks: once alone, once with a crash at a write."""
    rank, failure = divmod(first, len(FIRSTS) // RANKS)
    seeds: list[int] = []
    for second in range(1, len(SECONDS)):
        other_rank, other_failure = divmod(second - 1, (len(SECONDS) - 1) // (RANKS - 1))
        if (2 * rank + other_rank - failure - other_failure) % 3:
            continue
        write = 1 + (first + second) // 2 % WRITES if other_rank else 0
        seeds.append(FIRST_SEED + (first * len(SECONDS) + second) * (WRITES + 1) + write)
    outcomes = run_all(seeds)
    assert sum(outcome.exit_code == EXIT_DONE for outcome in outcomes) > len(outcomes) / 2


@pytest.mark.parametrize("chunk", range(4))
def test_power_cuts(chunk: int) -> None:
    """The coordinator's machine loses power in random schedules; everything it sent was already on disk."""
    run_all(range(FIRST_POWER_SEED + chunk, FIRST_POWER_SEED + POWER_SCHEDULES, 4))


def test_coordinators_on_an_older_store_end_without_stopping_workers() -> None:
    """The store is restored from a backup while the job trains, and later the newest data returns."""
    found = 0
    for seed in range(FIRST_OUTDATED_SEED, FIRST_OUTDATED_SEED + 24):
        cluster = SimCluster(plan_of(seed))
        cluster.run()
        found += cluster.outdated_seen > 0
    assert found >= 6


@pytest.mark.parametrize("chunk", range(2))
def test_random_schedules_with_a_slow_store(chunk: int) -> None:
    """Messages wait for the record, and coordinators die during a write."""
    run_all(range(FIRST_SLOW_SEED + chunk, FIRST_SLOW_SEED + SLOW_SCHEDULES, 2))


def test_random_schedules_that_a_user_interrupts() -> None:
    """After Ctrl-C at any moment of any schedule the job ends, with its state saved if possible."""
    outcomes = run_all(range(FIRST_INTERRUPTED_SEED, FIRST_INTERRUPTED_SEED + INTERRUPTED_SCHEDULES))
    assert sum(outcome.exit_code == EXIT_INTERRUPTED for outcome in outcomes) > 0.8 * len(outcomes)


@pytest.mark.parametrize("power_cut", [False, True], ids=("killed", "power cut"))
@pytest.mark.parametrize("number", range(0, len(FIRSTS), 21))
def test_the_coordinator_dies_at_every_write(number: int, power_cut: bool) -> None:
    """The job still finishes in time, with every step and every sample exactly once."""
    tally = Tally()
    for schedule in killed_at_every_write(one_failure(number), power_cut=power_cut):
        tally.run(schedule, must_end=EXIT_DONE)
    assert tally.examples == {}
    assert tally.ended["enumerated", EXIT_DONE] > 30


def test_every_enumerated_schedule_has_its_own_number() -> None:
    assert len(FIRSTS) == 3 * 7 * 3
    assert len(FIRSTS) * len(SECONDS) * (WRITES + 1) == SCHEDULES
    last = plan_of(FIRST_SEED + SCHEDULES - 1)
    assert last.crashes_after_strike == (WRITES,)
    assert len(last.faults) == 2
    assert last.faults[0].target != last.faults[1].target


def test_schedules_with_collectives_by_levels() -> None:
    """Ranks fail between two levels of the reduction or of the commit operation."""
    seeds = range(FIRST_LEVEL_SEED, FIRST_LEVEL_SEED + LEVEL_SCHEDULES)
    tally = Tally()
    for seed in seeds:
        tally.run(Schedule(number=seed), must_end=EXIT_DONE)
    assert not tally.failed, tally.examples
    struck = {kind for kind, phase in tally.seen if phase == "climbing"}
    assert {FaultKind.KILL_NODE, FaultKind.KILL_WORKER, FaultKind.STOP_NODE, FaultKind.HANG} <= struck


def test_a_job_that_has_not_begun_waits_until_its_node_is_undrained() -> None:
    """Found by fuzzing: a node without retries is disconnected before the first generation, which needs all nodes."""
    (outcome,) = run_all([13483482278])
    assert outcome.exit_code == EXIT_DONE


def test_nodes_that_leave_during_a_full_restart_have_left_at_once() -> None:
    """The next message of another node is too late, because that node may already be expelled."""
    run_all([21366234139])


def test_a_replacement_has_the_rank_of_the_replaced_node() -> None:
    """A restarted process joined in the same generation in which a standby took a rank."""
    run_all([23619340484])


def test_a_paused_coordinator_keeps_no_node_from_its_successor() -> None:
    """The job had not begun, so the paused coordinator had nothing to write and never detected its successor."""
    run_all([920572026])


def test_large_schedules() -> None:
    until, numbers = time.process_time() + LARGE_S, itertools.count(FIRST_LARGE_SEED)
    run_all(itertools.takewhile(lambda number: number < FIRST_LARGE_SEED + 3 or time.process_time() < until, numbers))


def test_large_plans_have_faults_of_whole_racks() -> None:
    plans = [large_plan(seed) for seed in range(100)]
    assert {33, 128} <= {plan.nodes for plan in map(large_plan, range(1000))}
    assert any(len(plan.faults) > 16 for plan in plans)
    assert large_plan(5) == large_plan(5) != large_plan(6)


def test_random_plans_cover_every_kind_of_fault_and_size() -> None:
    plans = [random_plan(seed) for seed in range(300)]
    plans += [wide_plan(seed) for seed in range(300)] + [lively_plan(seed) for seed in range(10)]
    plans += [interrupted_plan(0), slow_plan(0), witness_plan(0), corrupt_plan(0)]
    plans += [raising_plan(0), *(ladder_plan(seed) for seed in range(10)), *(storm_plan(seed) for seed in range(10))]
    plans += [link_plan(seed) for seed in range(40)] + [memory_plan(seed) for seed in range(10)]
    plans += [leaving_plan(0), standby_plan(0), *(move_plan(seed) for seed in range(5))]
    plans += [differ_plan(seed) for seed in range(3)]
    plans += [notice_plan(seed) for seed in range(5)] + [straggler_plan(0)]
    plans += [outdated_plan(seed) for seed in range(5)]
    plans += [newcomer_plan(seed) for seed in range(10)]
    assert {fault.kind for plan in plans for fault in plan.faults} == set(FaultKind)
    assert {1, 16} <= {plan.nodes for plan in plans}
    assert any(plan.crashes for plan in plans)
    assert random_plan(5) == random_plan(5) != random_plan(6)
