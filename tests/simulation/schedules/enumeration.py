"""All schedules by number: an enumerated family and random families.

The enumerated family has three ranks, up to two failures and a coordinator crash at any write.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from tests.simulation.families.combined_plans import combined_plan
from tests.simulation.families.corrupt_plans import corrupt_plan
from tests.simulation.families.differ_plans import differ_plan
from tests.simulation.families.ladder_plans import ladder_plan
from tests.simulation.families.large_plans import large_plan
from tests.simulation.families.level_plans import layout_plan, level_plan
from tests.simulation.families.link_plans import link_plan
from tests.simulation.families.membership_plans import (
    leaving_plan,
    move_plan,
    notice_plan,
    pooled_move_plan,
    pooled_plan,
    reserve_plan,
    standby_plan,
    waiting_plan,
)
from tests.simulation.families.memory_plans import memory_plan
from tests.simulation.families.newcomer_plans import newcomer_plan
from tests.simulation.families.outdated_plans import outdated_plan
from tests.simulation.families.pair_plans import pair_plan
from tests.simulation.families.script_plans import beginning_plan, raising_plan, skipping_plan, stopping_plan
from tests.simulation.families.storm_plans import ready_plan, storm_plan
from tests.simulation.families.witness_plans import witness_plan
from tests.simulation.families.work_plans import straggler_plan, work_plan
from tests.simulation.faults.plans import (
    STEP_BOUNDARIES,
    Fault,
    FaultKind,
    FaultPlan,
    baseline_plan,
    interrupted_plan,
    lively_plan,
    power_plan,
    random_plan,
    slow_plan,
    wide_plan,
)

RANKS = 3
WRITES = 30
#: The first seed of the enumerated schedules.
FIRST_SEED = 1_000_000_000
#: The first seed of random schedules for baseline policies.
FIRST_BASELINE_SEED = 2_000_000_000
#: The first seed of random schedules with faults other than dead processes and broken connections.
FIRST_WIDE_SEED = 3_000_000_000
#: The first seed of random schedules with a lasting fault.
FIRST_LIVELY_SEED = 4_000_000_000
#: The first seed of random schedules in which the coordinator fails with its machine.
FIRST_POWER_SEED = 5_000_000_000
#: The first seed of random schedules that the user interrupts.
FIRST_INTERRUPTED_SEED = 6_000_000_000
#: The first seed of random schedules with a slow store.
FIRST_SLOW_SEED = 7_000_000_000
#: The first seed of random schedules with more nodes.
FIRST_LARGE_SEED = 8_000_000_000
#: The first seed of random schedules with hierarchical collectives.
FIRST_LEVEL_SEED = 9_000_000_000
#: The first seed of random schedules in which witnesses die.
FIRST_WITNESSES_SEED = 10_000_000_000
#: The first seed of random schedules in which nodes fail too often.
FIRST_LADDER_SEED = 13_000_000_000
#: The first seed of random schedules with slow work.
FIRST_WORK_SEED = 14_000_000_000
#: The first seed of random schedules with silent links.
FIRST_LINK_SEED = 16_000_000_000
#: The first seed of random schedules in which scripts request the end of the job.
FIRST_STOPPING_SEED = 18_000_000_000
#: The first seed of random schedules in which a step that some ranks have reduced is finished.
FIRST_READY_SEED = 20_000_000_000
#: The first seed of random schedules with draining nodes.
FIRST_LEAVING_SEED = 21_000_000_000
#: The first seed of random schedules with standbys.
FIRST_STANDBY_SEED = 22_000_000_000
#: The first seed of random schedules in which standbys replace nodes on request.
FIRST_MOVE_SEED = 23_000_000_000
#: The first seed of random schedules in which nodes receive termination notices.
FIRST_NOTICE_SEED = 24_000_000_000
#: The first seed of random schedules in which nodes become slow.
FIRST_STRAGGLER_SEED = 25_000_000_000
#: The first seed of random schedules in which the job waits for lost nodes.
FIRST_WAITING_SEED = 26_000_000_000
#: The first seed of random schedules in which the job runs in a pool.
FIRST_POOLED_SEED = 27_000_000_000
#: The first seed of random schedules in which the pool grants standbys.
FIRST_RESERVE_SEED = 28_000_000_000
#: The first seed of random schedules with replicas over several workers.
FIRST_LAYOUT_SEED = 29_000_000_000
#: The first seed of random schedules that combine such replicas with the faults of other families.
FIRST_COMBINED_SEED = 35_000_000_000
#: The first seed of random schedules in which all gradients are NaN after some step.
FIRST_SKIPPING_SEED = 36_000_000_000
#: The first seed of random schedules in which nodes of a pool's job are moved.
FIRST_POOLED_MOVE_SEED = 34_000_000_000
#: The first seed of random schedules in which state transfers fail in one direction.
FIRST_NEWCOMER_SEED = 30_000_000_000
#: The first seed of random schedules in which workers' settings differ.
FIRST_DIFFER_SEED = 33_000_000_000
#: The first seed of random schedules in which the store is restored from a backup.
FIRST_OUTDATED_SEED = 41_000_000_000
#: The first seed of random schedules with all kinds of faults at once.
FIRST_STORM_SEED = 15_000_000_000
#: The first seed of random schedules in which the script never reaches its loop.
FIRST_BEGINNING_SEED = 17_000_000_000
#: The first seed of random schedules with one wrong gradient in a worker's sums.
FIRST_CORRUPT_SEED = 12_000_000_000
#: The first seed of random schedules in which scripts raise exceptions.
FIRST_RAISING_SEED = 11_000_000_000

#: The first seed of schedules with one kind of fault in one phase.
FIRST_PAIR_SEED = 42_000_000_000
#: The first seed of random schedules with snapshots in memory.
FIRST_MEMORY_SEED = 19_000_000_000

_KINDS = (FaultKind.KILL_NODE, FaultKind.STOP_NODE, FaultKind.KILL_WORKER)
_IN_RECOVERY = ("stopped", "begun", "built", "entered")
#: Longer than a lease, so the node is expelled before it continues.
_STOPPED_S = 1.3

FIRSTS = tuple(product(range(RANKS), STEP_BOUNDARIES, _KINDS))
#: The second failure, with its rank relative to the first failure's, or None.
SECONDS = (None, *product(range(1, RANKS), STEP_BOUNDARIES + _IN_RECOVERY, _KINDS))
SCHEDULES = len(FIRSTS) * len(SECONDS) * (WRITES + 1)


def enumerated_plan(number: int) -> FaultPlan:
    """Return schedule `number` of `SCHEDULES`: a failure in step 2, a second failure and a coordinator crash.

    The coordinator crashes at a write, counted from the first failure; with 0 it does not crash.
    """
    rest, write = divmod(number, WRITES + 1)
    first, second = divmod(rest, len(SECONDS))
    rank, boundary, kind = FIRSTS[first]
    faults = [_failure(rank, boundary, kind)]
    other = SECONDS[second]
    if other is not None:
        faults.append(_failure((rank + other[0]) % RANKS, other[1], other[2]))
    return FaultPlan(
        seed=FIRST_SEED + number,
        nodes=RANKS,
        start_nodes=RANKS,
        steps=3,
        micro_batches=3,
        start_spread=0.0,
        faults=tuple(faults),
        crashes_after_strike=(write,) if write else (),
    )


#: The schedule numbers of each family.
FAMILIES: dict[str, range] = {
    "random": range(FIRST_SEED),
    "enumerated": range(FIRST_SEED, FIRST_SEED + SCHEDULES),
    "baseline": range(FIRST_BASELINE_SEED, FIRST_WIDE_SEED),
    "wide": range(FIRST_WIDE_SEED, FIRST_LIVELY_SEED),
    "lively": range(FIRST_LIVELY_SEED, FIRST_POWER_SEED),
    "power": range(FIRST_POWER_SEED, FIRST_INTERRUPTED_SEED),
    "interrupted": range(FIRST_INTERRUPTED_SEED, FIRST_SLOW_SEED),
    "slow": range(FIRST_SLOW_SEED, FIRST_LARGE_SEED),
    "large": range(FIRST_LARGE_SEED, FIRST_LEVEL_SEED),
    "levels": range(FIRST_LEVEL_SEED, FIRST_WITNESSES_SEED),
    "witnesses": range(FIRST_WITNESSES_SEED, FIRST_RAISING_SEED),
    "raising": range(FIRST_RAISING_SEED, FIRST_CORRUPT_SEED),
    "corrupt": range(FIRST_CORRUPT_SEED, FIRST_LADDER_SEED),
    "ladder": range(FIRST_LADDER_SEED, FIRST_LADDER_SEED + 1_000_000_000),
    "work": range(FIRST_WORK_SEED, FIRST_STORM_SEED),
    "stopping": range(FIRST_STOPPING_SEED, FIRST_STOPPING_SEED + 1_000_000_000),
    "storm": range(FIRST_STORM_SEED, FIRST_LINK_SEED),
    "links": range(FIRST_LINK_SEED, FIRST_BEGINNING_SEED),
    "beginning": range(FIRST_BEGINNING_SEED, FIRST_STOPPING_SEED),
    "memory": range(FIRST_MEMORY_SEED, FIRST_MEMORY_SEED + 1_000_000_000),
    "ready": range(FIRST_READY_SEED, FIRST_READY_SEED + 1_000_000_000),
    "leaving": range(FIRST_LEAVING_SEED, FIRST_LEAVING_SEED + 1_000_000_000),
    "standbys": range(FIRST_STANDBY_SEED, FIRST_STANDBY_SEED + 1_000_000_000),
    "moves": range(FIRST_MOVE_SEED, FIRST_MOVE_SEED + 1_000_000_000),
    "stragglers": range(FIRST_STRAGGLER_SEED, FIRST_STRAGGLER_SEED + 1_000_000_000),
    "notices": range(FIRST_NOTICE_SEED, FIRST_NOTICE_SEED + 1_000_000_000),
    "waiting": range(FIRST_WAITING_SEED, FIRST_WAITING_SEED + 1_000_000_000),
    "pooled": range(FIRST_POOLED_SEED, FIRST_POOLED_SEED + 1_000_000_000),
    "reserve": range(FIRST_RESERVE_SEED, FIRST_RESERVE_SEED + 1_000_000_000),
    "skipping": range(FIRST_SKIPPING_SEED, FIRST_SKIPPING_SEED + 1_000_000_000),
    "pooled_moves": range(FIRST_POOLED_MOVE_SEED, FIRST_POOLED_MOVE_SEED + 1_000_000_000),
    "outdated": range(FIRST_OUTDATED_SEED, FIRST_OUTDATED_SEED + 1_000_000_000),
    "layouts": range(FIRST_LAYOUT_SEED, FIRST_LAYOUT_SEED + 1_000_000_000),
    "combined": range(FIRST_COMBINED_SEED, FIRST_COMBINED_SEED + 1_000_000_000),
    "newcomers": range(FIRST_NEWCOMER_SEED, FIRST_NEWCOMER_SEED + 1_000_000_000),
    "differ": range(FIRST_DIFFER_SEED, FIRST_DIFFER_SEED + 1_000_000_000),
    "pairs": range(FIRST_PAIR_SEED, FIRST_PAIR_SEED + 1_000_000_000),
}
_RANDOM_PLANS = {
    "random": random_plan,
    "baseline": baseline_plan,
    "wide": wide_plan,
    "lively": lively_plan,
    "power": power_plan,
    "interrupted": interrupted_plan,
    "slow": slow_plan,
    "large": large_plan,
    "levels": level_plan,
    "witnesses": witness_plan,
    "corrupt": corrupt_plan,
    "ladder": ladder_plan,
    "storm": storm_plan,
    "stopping": stopping_plan,
    "work": work_plan,
    "links": link_plan,
    "beginning": beginning_plan,
    "memory": memory_plan,
    "raising": raising_plan,
    "ready": ready_plan,
    "leaving": leaving_plan,
    "standbys": standby_plan,
    "moves": move_plan,
    "stragglers": straggler_plan,
    "notices": notice_plan,
    "waiting": waiting_plan,
    "pooled": pooled_plan,
    "reserve": reserve_plan,
    "skipping": skipping_plan,
    "pooled_moves": pooled_move_plan,
    "layouts": layout_plan,
    "combined": combined_plan,
    "newcomers": newcomer_plan,
    "differ": differ_plan,
    "outdated": outdated_plan,
    "pairs": pair_plan,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """A numbered schedule, optionally with an additional coordinator crash.

    The coordinator dies before write number `write` (from 1; 0 adds no crash), alone or in a power cut.
    """

    number: int
    write: int = 0
    power_cut: bool = False

    @property
    def plan(self) -> FaultPlan:
        """The fault plan of this schedule.

        Raises:
            ValueError: No schedule has this number.
        """
        plan = plan_of(self.number)
        if not self.write:
            return plan
        crashes = tuple(sorted({*plan.crashes, self.write}))
        return replace(plan, crashes=crashes, power_cuts=plan.power_cuts or self.power_cut)

    def __str__(self) -> str:
        """Return the arguments of `replay` for this schedule."""
        write = f" --write {self.write}" if self.write else ""
        return f"{self.number}{write}{' --power-cut' if self.power_cut else ''}"


def family_of(seed: int) -> str:
    """Return the family of a schedule.

    Raises:
        ValueError: No schedule has this number.
    """
    for name, seeds in FAMILIES.items():
        if seed in seeds:
            return name
    raise ValueError(f"no schedule has the number {seed}")


def plan_of(seed: int) -> FaultPlan:
    """Return the plan of a seed."""
    family = family_of(seed)
    if family == "enumerated":
        return enumerated_plan(seed - FIRST_SEED)
    return _RANDOM_PLANS[family](seed)


def _failure(rank: int, boundary: str, kind: FaultKind) -> Fault:
    step = 2 if boundary in STEP_BOUNDARIES else 0
    return Fault(kind=kind, target=rank, boundary=boundary, step=step, duration=_STOPPED_S)
