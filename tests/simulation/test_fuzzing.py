"""Tools for schedules: reproducible stories, shrunk failing plans, fault coverage and new random runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest

from holdfast.coordination.inputs import Disconnected, Input, Tick
from holdfast.coordination.instructions import Instruction
from holdfast.coordination.job.coordinator import Coordinator
from holdfast.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED
from tests.simulation.__main__ import main, replay
from tests.simulation.cluster import SimCluster
from tests.simulation.faults.coverage import Seen, expected, table
from tests.simulation.faults.plans import Fault, FaultKind, FaultPlan, random_plan
from tests.simulation.invariants import InvariantError
from tests.simulation.schedules.enumeration import FAMILIES, Schedule, plan_of
from tests.simulation.schedules.fuzzing import LONG_RUN, SHARES, Tally, fresh, report, too_much
from tests.simulation.schedules.shrinking import failure, shrunk, signature
from tests.simulation.world import Parts


def number_of(family: str) -> str:
    return str(FAMILIES[family].start + 10)


@pytest.fixture(scope="module")
def stories() -> list[dict[str, str]]:
    """The printed story of one schedule of each family, by number, from two processes."""
    code = """
import sys
from tests.simulation.__main__ import main
for number in sys.argv[1:]:
    print(end=f"\f{number}\f")
    main(["replay", number])
"""
    command = [sys.executable, "-c", code, *map(number_of, FAMILIES)]
    printed: list[dict[str, str]] = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        parts = done.stdout.split("\f")[1:]
        printed.append(dict(zip(parts[::2], parts[1::2], strict=True)))
    return printed


@pytest.mark.xdist_group("stories")
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_schedule_has_the_same_events_in_every_process(stories: list[dict[str, str]], family: str) -> None:
    first, second = (printed[number_of(family)] for printed in stories)
    assert first == second
    assert first.count("FaultPlan(seed=") == first.count("JobStarted(") == 1


class SeesNoEnds(Coordinator):
    """Ignores disconnects and ticks, so the wait for a dead node never ends."""

    def handle(self, event: Input, now: float) -> list[Instruction]:
        return [] if isinstance(event, Disconnected | Tick) else super().handle(event, now)


BLIND = Parts(coordinator=SeesNoEnds)


def fails_blindly(plan: FaultPlan) -> str:
    return failure(SimCluster(plan, BLIND))


def test_a_failing_schedule_is_shrunk() -> None:
    plan = next(plan for plan in map(random_plan, range(50)) if len(plan.faults) > 4 and fails_blindly(plan))
    small = shrunk(plan, fails_blindly)
    assert fails_blindly(small) == fails_blindly(plan) == "InvariantError: at the job is stuck"
    assert len(small.faults) + len(small.crashes) <= 1
    assert (small.workers_per_node, small.checkpoint_every, small.experts) == (1, 0, 0)
    assert small.nodes < plan.nodes
    assert small.start_nodes <= small.nodes


def test_a_shrunk_schedule_keeps_whole_replicas_on_each_node() -> None:
    plan = replace(random_plan(7), workers_per_node=4, places=2, layouts=((1, 2), (2, 4)))
    small = shrunk(plan, lambda _: "always")
    assert (small.nodes, small.workers_per_node) == (1, 4)


def test_a_run_with_too_many_events_fails() -> None:
    cluster = SimCluster(random_plan(7))
    cluster.most_events = SimCluster(random_plan(7)).run().events - 1
    assert failure(cluster) == "InvariantError: at the job is stuck"


def test_a_passing_schedule_is_not_shrunk() -> None:
    plan = random_plan(7)
    assert shrunk(plan) is plan


def test_equal_failures_have_equal_signatures() -> None:
    first = InvariantError("at 0.6927: checkpoint Known(step=3) is not on the lineage\nseed 1: FaultPlan()")
    second = InvariantError("at 12.1: checkpoint Known(step=4) is not on the lineage\nseed 2: FaultPlan()")
    other = InvariantError("at 12.1: the job is stuck")
    assert signature(first) == signature(second) != signature(other)


def test_faults_are_counted_by_phase() -> None:
    kill = Fault(kind=FaultKind.KILL_NODE, boundary="voted", step=2)
    crash = Fault(kind=FaultKind.CRASH_COORDINATOR, time=0.05, duration=0.1)
    cluster = SimCluster(FaultPlan(seed=1, faults=(kill, crash), crashes=(3,)))
    cluster.run()
    seen = cluster.injector.seen
    assert seen["kill_node", "voted"] == 1
    assert seen["crash_coordinator", "waiting"] + seen["crash_coordinator", "away"] == 1
    assert sum(number for (kind, _), number in seen.items() if kind.startswith("crash before")) == 1


def test_the_table_distinguishes_unseen_from_impossible_pairs() -> None:
    seen: Seen = Counter({("kill_node", "voted"): 41})
    lines = table(seen).splitlines()
    header = next(line for line in lines if "voted" in line)
    row = next(line for line in lines if line.startswith("kill_node")).split()
    assert row[1 + header.split().index("voted")] == "41"
    assert row.count("0") == len(row) - 2
    assert "." in next(line for line in lines if line.startswith("glitch")).split()
    assert ("glitch", "attach") not in expected()
    assert ("supersede", "swapping") in expected()


def test_a_long_run_fails_if_it_has_never_seen_a_pair(capsys: pytest.CaptureFixture[str]) -> None:
    everything = Counter(dict.fromkeys(expected(), 1))
    all_families = tuple(FAMILIES)
    long = Tally(schedules=Counter({"random": LONG_RUN}), seen=everything)
    assert not report(long, 1.0, all_families)
    del everything["cut", "voted"]
    assert report(long, 1.0, all_families)
    assert "never seen: cut, voted" in capsys.readouterr().out
    assert not report(long, 1.0, ("random",)), "one family alone must not be required to cover every pair"
    assert not report(replace(long, schedules=Counter({"random": LONG_RUN - 1})), 1.0, all_families)


def test_fresh_schedules_cover_all_families_and_differ() -> None:
    def some() -> list[int]:
        source = fresh(tuple(FAMILIES))
        return [next(source).number for _ in range(sum(SHARES.values()))]

    first, second = some(), some()
    assert all(any(seed in seeds for seed in first) for seeds in FAMILIES.values())
    assert set(first) != set(second)


def test_a_failure_is_printed_with_its_replay_command(capsys: pytest.CaptureFixture[str]) -> None:
    seed = next(seed for seed in range(50) if fails_blindly(plan_of(seed)))
    tally = Tally()
    tally.run(Schedule(number=seed), BLIND)
    report(tally, 1.0, ("random",))
    output = capsys.readouterr().out
    assert "FAILED 1 x InvariantError: at the job is stuck" in output
    assert f"python -m tests.simulation replay {seed}" in output
    assert f"FaultPlan(seed={seed}" in output
    assert replay(plan_of(seed), BLIND) == EXIT_FAILED
    assert "the job is stuck" in capsys.readouterr().out


def test_replay_of_a_schedule_that_passes() -> None:
    assert replay(plan_of(7)) == EXIT_DONE


def test_one_job_of_any_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["one", "--nodes", "40", "--steps", "10", "--faults", "4"]) == EXIT_DONE
    output = capsys.readouterr().out
    assert "40 nodes, 10 steps, 4 of 4 faults struck" in output
    assert "(0, 'done')" in output


def test_large_schedules_take_a_limited_share_of_the_time() -> None:
    large, other = (Schedule(number=FAMILIES[family].start) for family in ("large", "random"))
    busy = Tally(seconds={"large": 2.0, "random": 8.0})
    calm = Tally(seconds={"large": 1.0, "random": 9.0})
    assert [too_much(tally, schedule) for tally in (busy, calm) for schedule in (large, other)] == [True] + 3 * [False]


@pytest.mark.parametrize(
    "arguments",
    [
        ["replay", "-1"],
        ["replay", "7", "--write", "-2"],
        ["replay", "7", "--power-cut"],
        ["fuzz", "--seconds", "0"],
        ["fuzz", "--processes", "-1"],
        ["writes", "--schedules", "0"],
        ["one", "--nodes", "0"],
        ["one", "--faults", "-1"],
    ],
)
def test_bad_input(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == EXIT_BAD_INPUT
    assert arguments[-1] in capsys.readouterr().err


def test_the_family_of_pairs_strikes_in_rare_phases() -> None:
    tally, start = Tally(), FAMILIES["pairs"].start
    for number in range(start, start + 150):
        tally.run(Schedule(number=number))
    assert not tally.failed
    rare = [kind for kind in FaultKind if kind not in (FaultKind.LAG_DOWN, FaultKind.CORRUPT_SUM)]
    struck = {phase for kind in rare for phase in ("climbing", "moving", "refused", "ended") if tally.seen[kind, phase]}
    assert struck == {"climbing", "moving", "refused", "ended"}
