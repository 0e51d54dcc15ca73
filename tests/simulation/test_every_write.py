"""Killing the coordinator at every write of many schedules: the selection and the printed results."""

from __future__ import annotations

import pytest

from holdfast.coordination.agent.instructions import AgentInstruction
from holdfast.coordination.agent.machine import AgentMachine
from holdfast.coordination.instructions import Instruction
from holdfast.coordination.job.coordinator import Coordinator
from holdfast.errors import EXIT_DONE
from tests.simulation.__main__ import main
from tests.simulation.cluster import SimCluster
from tests.simulation.schedules.enumeration import FIRSTS, Schedule, family_of, plan_of
from tests.simulation.schedules.every_write import chosen, disturb, killed_at_every_write, one_failure, writes
from tests.simulation.world import Parts


class CannotTakeOver(Coordinator):
    """Only the first coordinator of a job starts."""

    def start(self, now: float, url: str, pid: int) -> list[Instruction]:
        if self.record.term > 0:
            raise RuntimeError("a coordinator took over")
        return super().start(now, url, pid)


class CannotStart(AgentMachine):
    """Fails at once, so that a schedule takes no time."""

    def start(self) -> list[AgentInstruction]:
        raise RuntimeError("no agent starts")


def test_schedules_with_one_failure_precede_random_ones() -> None:
    schedules = list(chosen(200, seed=3))
    assert schedules[: len(FIRSTS)] == [one_failure(number) for number in range(len(FIRSTS))]
    assert {family_of(schedule.number) for schedule in schedules[len(FIRSTS) :]} == {
        "random",
        "wide",
        "lively",
        "baseline",
    }
    assert len(set(schedules)) == 200
    assert schedules == list(chosen(200, seed=3)) != list(chosen(200, seed=4))


def test_a_schedule_gets_a_crash_at_each_write_and_keeps_its_own_crashes() -> None:
    schedule = next(one for one in map(_random, range(50)) if one.plan.crashes)
    disturbed = list(killed_at_every_write(schedule, power_cut=True))
    cluster = SimCluster(schedule.plan)
    cluster.run()
    assert [one.write for one in disturbed] == list(range(1, cluster.writes + 1))
    assert all(set(one.plan.crashes) == {*schedule.plan.crashes, one.write} for one in disturbed)
    assert all(one.plan.power_cuts for one in disturbed)
    assert schedule.plan == plan_of(schedule.number)


def test_each_write_is_tested_with_a_crash_and_with_a_power_cut() -> None:
    schedule = one_failure(5)
    cluster = SimCluster(schedule.plan)
    cluster.run()
    tally = disturb(schedule)
    assert tally.schedules.total() == 1 + 2 * cluster.writes
    assert tally.ended["enumerated", EXIT_DONE] == tally.schedules.total()


def test_a_failed_crash_is_printed_with_its_replay_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert not writes(1, seed=0, processes=1, parts=Parts(coordinator=CannotTakeOver))
    output = capsys.readouterr().out
    assert "RuntimeError: a coordinator took over" in output
    number = one_failure(0).number
    assert f"python -m tests.simulation replay {number} --write 2\n" in output
    assert "; 0 failed" not in output


def test_a_long_run_prints_its_progress(capsys: pytest.CaptureFixture[str]) -> None:
    assert not writes(21, seed=0, processes=1, parts=Parts(agent=CannotStart))
    assert capsys.readouterr().err == "20 of 21 schedules, 20 runs failed\n"


def test_an_unexpected_exit_code_counts_as_a_failure() -> None:
    tally = disturb(one_failure(0))
    tally.run(one_failure(1), must_end=EXIT_DONE + 1)
    assert list(tally.failed) == ["the job ended with an unexpected exit code: done"]


def test_a_disturbed_schedule_is_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    schedule = Schedule(number=one_failure(3).number, write=9, power_cut=True)
    assert main(["replay", *str(schedule).split()]) == EXIT_DONE
    output = capsys.readouterr().out
    assert "crashes=(9,)" in output
    assert "power cut" in output


def _random(seed: int) -> Schedule:
    return Schedule(number=seed)
