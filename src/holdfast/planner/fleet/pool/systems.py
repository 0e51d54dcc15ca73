"""Ways to live through failures: ours, and others' as far as Unicron's paper says. All their numbers are stated here.

What stands in `assumes` is printed beside every result. A system's `efficiency` is what it achieves of Megatron's
FLOP/s on the same nodes; those of Bamboo, Oobleck and Varuna are not printed: 1 here, until they are fitted or given.
Transient faults: the process fails, the node lives. How each system comes by nodes is said by `shares`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from msgspec import structs

from holdfast.coordination.pool.share.policies import POLICIES
from holdfast.errors import BadInputError
from holdfast.planner.fleet.case import FleetCase
from holdfast.planner.fleet.recovery import Moment, detection_s, recovery_parts

MINUTE_S = 60.0
#: Figure 2, a transient fault under Megatron: it hangs until the timeout of 30 min, is resubmitted (9), set up (14),
#: and what came after the checkpoint is computed again (15 on average, section 7.3)
HANG_S, RESUBMIT_S, SET_UP_S, AGAIN_S = 30 * MINUTE_S, 9 * MINUTE_S, 14 * MINUTE_S, 15 * MINUTE_S
#: Table 2: a lost node is seen after so long without Unicron
NODE_SEEN_S = 5.7
#: TrainMover, Table 1: cold warm-up of a process at 8,192 GPUs, 40.4 % of 4.45 min
WARM_S = 0.404 * 4.45 * MINUTE_S


@dataclass(frozen=True, slots=True)
class LostTime:
    """How long a job does nothing: until the failure is seen, and from then on."""

    seen_s: float
    resume_s: float


class SystemTimes(Protocol):
    """How long failures and changes keep a job of so many nodes from training."""

    @property
    def arrives_s(self) -> float:
        """How long after a job is given a node this trains in it; until then the job goes on without."""
        ...

    def lost(self, nodes: int, marks: tuple[float, ...]) -> LostTime:
        """Return what the loss of one of its nodes costs, once it goes on without."""
        ...

    def fault(self, nodes: int, marks: tuple[float, ...]) -> LostTime:
        """Return what a process that fails costs, where the node lives."""
        ...

    def change_s(self, nodes: int) -> float:
        """Return what it costs that it has another number of nodes, this one, by a plan."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedTimes:
    """The same each time."""

    loss: LostTime
    process: LostTime
    changed_s: float
    arrives_s: float = 0.0

    def lost(self, nodes: int, marks: tuple[float, ...]) -> LostTime:
        """Return the loss."""
        return self.loss

    def fault(self, nodes: int, marks: tuple[float, ...]) -> LostTime:
        """Return the fault."""
        return self.process

    def change_s(self, nodes: int) -> float:
        """Return the change."""
        return self.changed_s


@dataclass(frozen=True, kw_only=True, slots=True)
class HoldfastTimes:
    """Ours: a recovery's parts (`fleet.recovery`), with every constant of `holdfast simulate --set`.

    A process that fails is seen by its connection's end, begins anew (`warm_s`) and joins its group again. A planned
    change costs as much as a recovery in which nothing failed: as if groups were built in its way, though ours are
    built beside training; `changed_s` says otherwise.
    """

    case: FleetCase = field(default_factory=FleetCase)
    warm_s: float = WARM_S
    changed_s: float | None = None
    arrives_s: float = 0.0

    def lost(self, nodes: int, marks: tuple[float, ...]) -> LostTime:
        """Return what one recovery takes."""
        before, moment = max(nodes, 1), self._moment(marks, self.case.recovery.silent_share)
        case = self._sized(before)
        seen_s = detection_s(case, moment, before)
        parts = recovery_parts(case, moment, before, max(before - 1, 1))
        return LostTime(seen_s, max(0.0, parts.total - seen_s))

    def fault(self, nodes: int, marks: tuple[float, ...]) -> LostTime:
        """Return what it takes that a process begins anew; the step in progress is computed again."""
        held, moment = max(nodes, 1), self._moment(marks, 0.0)
        case = self._sized(held)
        parts = recovery_parts(case, moment, held, held)
        again_s = marks[3] * case.job.step_s
        return LostTime(self.case.recovery.reset_s, self.warm_s + parts.total + again_s)

    def change_s(self, nodes: int) -> float:
        """Return what a recovery takes in which nothing failed."""
        held = max(nodes, 1)
        return recovery_parts(self._sized(held), None, held, held).total if self.changed_s is None else self.changed_s

    def _sized(self, nodes: int) -> FleetCase:
        return structs.replace(self.case, nodes=nodes, min_nodes=1)

    @staticmethod
    def _moment(marks: tuple[float, ...], silent_share: float) -> Moment:
        return Moment(silent=marks[0] < silent_share, word_age=marks[1], look=marks[2], phase=marks[3])


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """A way to live through failures.

    shares: how nodes are shared out: `pool`, by our pool's machine and its `policy`; `hit`, section 7.5's rule: only
    the job that is hit is changed; `waits`: so too, but it trains only with all its nodes. spares: nodes beside the
    pool's that wait. assumes: what is stated of it, for people.
    """

    name: str
    shares: Literal["pool", "hit", "waits"]
    times: SystemTimes
    policy: str = ""
    efficiency: float = 1.0
    spares: int = 0
    assumes: tuple[str, ...] = ()


OWN = HoldfastTimes()
_OWN_ASSUMES = (
    "a recovery's parts as holdfast simulate --scale has them (NCCL groups by TrainMover's figures)",
    f"a failed process begins anew in {WARM_S:.0f} s (TrainMover, Table 1); every other failure is of that kind",
    "a planned change costs a whole regroup, though groups are built beside training",
)
_RULE = "section 7.5: the plan of waf at first; then only the job that is hit changes; a node that is back is its"


def _megatron(name: str, spares: int, more: str) -> System:
    resume_s = RESUBMIT_S + SET_UP_S + AGAIN_S
    return System(
        name=name,
        shares="waits",
        times=FixedTimes(loss=LostTime(NODE_SEEN_S, resume_s), process=LostTime(HANG_S, resume_s), changed_s=resume_s),
        spares=spares,
        assumes=(
            "Figure 2: another failure hangs 30 min, then takes 9 + 14 + 15 min; a lost node 5.7 s and those 38 min",
            more,
        ),
    )


def _elastic(name: str, seen_s: float, resume_s: float, assumed: str) -> System:
    stop = LostTime(seen_s, resume_s)
    return System(
        name=name,
        shares="hit",
        times=FixedTimes(loss=stop, process=stop, changed_s=resume_s),
        assumes=(assumed, "ASSUMED: another failure costs as much as a lost node, and the node stays", _RULE),
    )


def _shared(policy: str) -> System:
    return System(name=policy, shares="pool", policy=policy, times=OWN, assumes=_OWN_ASSUMES)


#: all systems by name: the pool's policies with our own times, and others'
SYSTEMS: dict[str, System] = {
    **{policy: _shared(policy) for policy in POLICIES},
    "hit-only": System(name="hit-only", shares="hit", times=OWN, assumes=(*_OWN_ASSUMES, _RULE)),
    "megatron": _megatron("megatron", 0, "no spare: the job waits until its node is repaired"),
    "megatron-spare": _megatron("megatron-spare", 1, "one node more than the others have waits as a hot spare"),
    "bamboo": _elastic(
        "bamboo", NODE_SEEN_S, 2 * MINUTE_S, "ASSUMED: goes on 2 min after 5.7 s, nothing is computed again"
    ),
    "oobleck": _elastic(
        "oobleck", NODE_SEEN_S, 2 * MINUTE_S, "ASSUMED: goes on 2 min after 5.7 s, nothing is computed again"
    ),
    "varuna": _elastic(
        "varuna",
        NODE_SEEN_S,
        SET_UP_S + AGAIN_S,
        "ASSUMED: set up anew (14 min, as Megatron) after 5.7 s, 15 min computed again from the checkpoint",
    ),
}


def system_named(name: str) -> System:
    """Return a system.

    Raises:
        BadInputError: there is none of that name.
    """
    if name not in SYSTEMS:
        raise BadInputError(f"--policy {name}: it must be one of {', '.join(SYSTEMS)}")
    return SYSTEMS[name]


def assumed(systems: Sequence[System]) -> list[str]:
    """Return what is assumed of some systems, each thing once with the names of all of which it is."""
    said = dict.fromkeys(text for system in systems for text in system.assumes)
    return [f"{', '.join(system.name for system in systems if text in system.assumes)}: {text}" for text in said]


def at_efficiency(system: System, efficiency: float) -> System:
    """Return a system that achieves so much of Megatron's FLOP/s."""
    return replace(system, efficiency=efficiency)
