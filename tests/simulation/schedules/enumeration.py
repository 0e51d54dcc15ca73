"""All schedules by number: every one of three ranks with up to two failures and a coordinator that dies at any write,
and the random ones of each family."""

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
#: seeds from here on name enumerated schedules
FIRST_SEED = 1_000_000_000
#: from here on, random ones for the policies that others have
FIRST_BASELINE_SEED = 2_000_000_000
#: from here on, random ones with faults that are not processes' or connections' ends
FIRST_WIDE_SEED = 3_000_000_000
#: from here on, random ones with a fault that lasts
FIRST_LIVELY_SEED = 4_000_000_000
#: from here on, random ones whose coordinator goes down with its machine
FIRST_POWER_SEED = 5_000_000_000
#: from here on, random ones that their user ends
FIRST_INTERRUPTED_SEED = 6_000_000_000
#: from here on, random ones whose store is slow
FIRST_SLOW_SEED = 7_000_000_000
#: from here on, random ones with more nodes
FIRST_LARGE_SEED = 8_000_000_000
#: from here on, random ones whose collectives go level by level
FIRST_LEVEL_SEED = 9_000_000_000
#: from here on, random ones whose witnesses die
FIRST_WITNESSES_SEED = 10_000_000_000
#: from here on, random ones whose nodes fail too often
FIRST_LADDER_SEED = 13_000_000_000
#: from here on, random ones with work that takes its time
FIRST_WORK_SEED = 14_000_000_000
#: from here on, random ones whose links fall silent
FIRST_LINK_SEED = 16_000_000_000
#: from here on, random ones whose scripts ask for the end
FIRST_STOPPING_SEED = 18_000_000_000
#: from here on, random ones in which a step that some have reduced is finished
FIRST_READY_SEED = 20_000_000_000
#: from here on, random ones in which nodes are asked to leave
FIRST_LEAVING_SEED = 21_000_000_000
#: from here on, random ones with standbys
FIRST_STANDBY_SEED = 22_000_000_000
#: from here on, random ones in which nodes give their places to standbys
FIRST_MOVE_SEED = 23_000_000_000
#: from here on, random ones in which nodes are told to end, and have a little time
FIRST_NOTICE_SEED = 24_000_000_000
#: from here on, random ones whose nodes become slow
FIRST_STRAGGLER_SEED = 25_000_000_000
#: from here on, random ones whose job waits for the nodes that it has lost
FIRST_WAITING_SEED = 26_000_000_000
#: from here on, random ones whose job runs in a pool
FIRST_POOLED_SEED = 27_000_000_000
#: from here on, random ones whose pool has standbys for them
FIRST_RESERVE_SEED = 28_000_000_000
#: from here on, random ones whose replicas lie over several workers
FIRST_LAYOUT_SEED = 29_000_000_000
#: from here on, random ones that combine such replicas with the faults of the other families
FIRST_COMBINED_SEED = 35_000_000_000
#: from here on, random ones in which all gradients are NaN from some step on
FIRST_SKIPPING_SEED = 36_000_000_000
#: from here on, random schedules in which nodes of a pool's job are moved
FIRST_POOLED_MOVE_SEED = 34_000_000_000
#: from here on, random ones whose transfers of state fail in one direction
FIRST_NEWCOMER_SEED = 30_000_000_000
#: workers whose settings differ
FIRST_DIFFER_SEED = 33_000_000_000
#: from here on, random ones whose store is put back to a backup
FIRST_OUTDATED_SEED = 41_000_000_000
#: from here on, random ones with everything at once
FIRST_STORM_SEED = 15_000_000_000
#: from here on, random ones whose script never comes to its loop
FIRST_BEGINNING_SEED = 17_000_000_000
#: from here on, random ones with one wrong gradient in somebody's sums
FIRST_CORRUPT_SEED = 12_000_000_000
#: from here on, random ones whose scripts raise
FIRST_RAISING_SEED = 11_000_000_000

#: from here on, schedules that strike with one kind of fault in one phase
FIRST_PAIR_SEED = 42_000_000_000
#: from here on, random ones with snapshots in memory
FIRST_MEMORY_SEED = 19_000_000_000

_KINDS = (FaultKind.KILL_NODE, FaultKind.STOP_NODE, FaultKind.KILL_WORKER)
_IN_RECOVERY = ("stopped", "begun", "built", "entered")
#: longer than a lease: the node is expelled, and wakes up
_STOPPED_S = 1.3

FIRSTS = tuple(product(range(RANKS), STEP_BOUNDARIES, _KINDS))
#: the other rank is counted from the first failure's; None: there is no second failure
SECONDS = (None, *product(range(1, RANKS), STEP_BOUNDARIES + _IN_RECOVERY, _KINDS))
SCHEDULES = len(FIRSTS) * len(SECONDS) * (WRITES + 1)


def enumerated_plan(number: int) -> FaultPlan:
    """Return schedule `number` of `SCHEDULES`: a failure in step 2, a second one, a write where the coordinator dies.

    The write is counted from the first failure on; 0: it lives.
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


#: all schedules have a number; those of a family, theirs
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
    """A numbered schedule, as it is, or with the coordinator dying once more: before its n-th write (1-based; 0: as it
    is), in a power cut or alone."""

    number: int
    write: int = 0
    power_cut: bool = False

    @property
    def plan(self) -> FaultPlan:
        """What goes wrong.

        Raises:
            ValueError: no schedule has this number.
        """
        plan = plan_of(self.number)
        if not self.write:
            return plan
        crashes = tuple(sorted({*plan.crashes, self.write}))
        return replace(plan, crashes=crashes, power_cuts=plan.power_cuts or self.power_cut)

    def __str__(self) -> str:
        """Return what `replay` is given to run it."""
        write = f" --write {self.write}" if self.write else ""
        return f"{self.number}{write}{' --power-cut' if self.power_cut else ''}"


def family_of(seed: int) -> str:
    """Return the family of a schedule.

    Raises:
        ValueError: no schedule has this number.
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
