"""Tests of the simulator against real pool runs, which benchmarks/pool_waf.py --record wrote to `real_runs.json`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from benchmarks.real_run import (
    NodeAssignment,
    NodeChange,
    RealGeneration,
    RealJob,
    RealRun,
    RealStep,
    measure_durations,
    predict,
)
from holdfast.planner.fleet.pool.divided_shares import DividedShares
from holdfast.planner.fleet.pool.outages import FleetTrace, Outage
from holdfast.planner.fleet.pool.systems import SYSTEMS, FixedTimes, LostTime
from holdfast.planner.fleet.pool.tasks import FleetTask
from holdfast.planner.fleet.pool.trace_run import PoolSimulation

RUNS = msgspec.json.decode(Path(__file__).with_name("real_runs.json").read_bytes(), type=list[RealRun])


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.policy)
def test_the_throughput_of_a_real_pool_is_predicted_within_a_tenth(run: RealRun) -> None:
    assert sum(one.what == "lost" for one in run.struck) >= 3
    assert predict(run).total == pytest.approx(run.total, rel=0.1)


def test_durations_measured_with_one_policy_predict_another_policy() -> None:
    ours, beside = RUNS
    assert (ours.policy, beside.policy) == ("waf", "sized")
    assert ours.struck == beside.struck
    assert predict(beside, measured=measure_durations(ours)).total == pytest.approx(beside.total, rel=0.1)
    # This is the rule of section 7.5: the job hit first is repaired first, while `sized` goes by arrival.
    assert predict(beside, "hit-only").total == pytest.approx(beside.total, rel=0.1)


def test_a_step_across_the_end_counts_in_part_and_undone_steps_do_not() -> None:
    steps = (RealStep(1.0, 4.0, 2, 8, 1), RealStep(5.0, 4.0, 2, 8, 1), RealStep(9.0, 4.0, 2, 8, 1))
    assert one_job(steps).samples_done(7.0) == pytest.approx(2 + 8 + 4)
    assert one_job((*steps, RealStep(6.0, 0.0, 0, -8, 1))).samples_done(7.0) == pytest.approx(2 + 8 + 4 - 8)


def test_durations_are_the_extra_times_of_the_first_steps_after_a_change() -> None:
    steps = [RealStep(at, 1.0, 3, 12, 1) for at in (-2.0, -1.0, 0.0, 1.0)]
    steps += [RealStep(4.0, 3.0, 2, 12, 2), RealStep(5.5, 1.5, 2, 12, 2), RealStep(7.0, 1.5, 2, 12, 2)]
    steps += [RealStep(8.2, 1.2, 3, 12, 3), RealStep(9.2, 1.0, 3, 12, 3)]
    generations = (
        RealGeneration(1, -3.0, "start", ("a", "b", "c")),
        RealGeneration(2, 2.5, "failure", ("a", "b")),
        RealGeneration(3, 7.5, "join", ("a", "b", "c")),
    )
    run = RealRun(
        policy="waf",
        seconds=10.0,
        nodes=("a", "b", "c"),
        first=dict.fromkeys("abc", "only"),
        struck=(NodeChange(1.5, "c", "lost"), NodeChange(4.0, "c", "back")),
        words=(NodeAssignment(2.0, "c", "only", "released"), NodeAssignment(6.0, "c", "only", "granted")),
        jobs=(one_job(tuple(steps), generations),),
    )
    found = measure_durations(run)
    assert found.stop == pytest.approx(1.5)
    assert found.change == pytest.approx(0.2)
    assert (found.seen, found.back, found.arrives) == (0.5, 2.0, 1.5)
    assert found.times.loss == LostTime(0.5, 1.0)
    assert run.jobs[0].usual_step_s() == {3: 1.0, 2: 1.5}
    # The job is stopped from 1.5 to 3.0, and has three nodes again 3.5 s after 4.0, which costs 0.2 s.
    assert predict(run).total == pytest.approx(12 * (1.5 / 1.0 + (7.5 - 3.0) / 1.5 + (10.0 - 7.7) / 1.0))


def test_a_job_trains_without_a_granted_node_until_the_node_joins() -> None:
    task = FleetTask(name="only", step_s=(4.0, 2.0, 1.0), flop=1.0)
    times = FixedTimes(loss=LostTime(1.0, 1.0), process=LostTime(0.0, 0.0), changed_s=0.5, arrives_s=3.0)
    system = replace(SYSTEMS["waf"], times=times)
    names = ("a", "b", "c")
    outages = (Outage(at=10.0, node="c", what="lost"), Outage(at=20.0, node="c", what="back"))
    trace = FleetTrace(name="made", nodes=names, outages=outages, seconds=40.0)
    shares = DividedShares("waf", [task], names, times.change_s, first=dict.fromkeys(names, "only"))
    lived = PoolSimulation(system, trace, shares, [task]).run()
    assert lived.steps == ((0.0, 1.0), (10.0, 0.0), (12.0, 0.5), (23.0, 0.0), (23.5, 1.0))
    assert lived.total == pytest.approx(10.0 + 11.0 * 0.5 + 16.5)


def one_job(steps: tuple[RealStep, ...], generations: tuple[RealGeneration, ...] = ()) -> RealJob:
    return RealJob(
        name="only",
        weight=1.0,
        most=3,
        micro_batches=3,
        samples=12,
        flop_per_sample=1.0,
        steps=steps,
        generations=generations,
    )
