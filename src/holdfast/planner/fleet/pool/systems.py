"""Systems that survive failures: ours, and others as far as Unicron's paper describes them, with all their constants.

The texts in `assumes` are printed next to every result. A system's `efficiency` is its FLOP/s relative to Megatron's on
the same nodes. For Bamboo, Oobleck and Varuna it is not printed: it is 1 here until it is fitted or given. In a
transient fault the process fails and the node stays up. `System.shares` says how nodes are allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from msgspec import structs

from holdfast.coordination.pool.share.policies import POLICIES
from holdfast.errors import BadInputError
from holdfast.planner.fleet.case import FleetCase
from holdfast.planner.fleet.recovery import FailureMoment, detection_s, recovery_parts

MINUTE_S = 60.0
#: Figure 2, a transient fault under Megatron: the job hangs until the timeout of 30 min, is resubmitted (9) and set up
#: (14), and repeats the work after the checkpoint (15 on average, section 7.3).
HANG_S, RESUBMIT_S, SET_UP_S, AGAIN_S = 30 * MINUTE_S, 9 * MINUTE_S, 14 * MINUTE_S, 15 * MINUTE_S
#: Table 2: seconds until a lost node is noticed without Unicron
NODE_SEEN_S = 5.7
#: TrainMover, Table 1: cold warm-up of a process at 8,192 GPUs, 40.4 % of 4.45 min
WARM_S = 0.404 * 4.45 * MINUTE_S


@dataclass(frozen=True, slots=True)
class LostTime:
    """Time for which a failure stops a simulated job."""

    #: until the failure is noticed
    seen_s: float
    #: from then until training continues
    resume_s: float


class SystemTimes(Protocol):
    """How long failures and changes stop a job of a given number of nodes."""

    @property
    def arrives_s(self) -> float:
        """Seconds until a job trains on a node that it was given. Until then it continues without the node."""
        ...

    def loss_cost(self, nodes: int, marks: tuple[float, ...]) -> LostTime:
        """Return the cost of losing one of the job's nodes, after which it continues without the node."""
        ...

    def fault_cost(self, nodes: int, marks: tuple[float, ...]) -> LostTime:
        """Return the cost of a failed process on a node that stays up."""
        ...

    def change_s(self, nodes: int) -> float:
        """Return the seconds that a planned change to this number of nodes costs."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedTimes:
    """Times of recoveries that do not depend on the number of nodes."""

    loss: LostTime
    process: LostTime
    changed_s: float
    arrives_s: float = 0.0

    def loss_cost(self, nodes: int, marks: tuple[float, ...]) -> LostTime:
        """Return the cost of a lost node."""
        return self.loss

    def fault_cost(self, nodes: int, marks: tuple[float, ...]) -> LostTime:
        """Return the cost of a failed process."""
        return self.process

    def change_s(self, nodes: int) -> float:
        """Return the seconds of a planned change."""
        return self.changed_s


@dataclass(frozen=True, kw_only=True, slots=True)
class HoldfastTimes:
    """Our times: the parts of a recovery (`fleet.recovery`), with every constant of `holdfast simulate --set`.

    The end of its connection shows that a process has failed. It starts again (`warm_s`) and joins its group again. A
    planned change costs as much as a recovery without a failure, as if training waited for the new groups. In fact we
    build groups during training; set `changed_s` for another cost.
    """

    case: FleetCase = field(default_factory=FleetCase)
    #: seconds until a restarted process is warm
    warm_s: float = WARM_S
    #: seconds of a planned change, or None for the duration of a recovery without a failure
    changed_s: float | None = None
    arrives_s: float = 0.0

    def loss_cost(self, nodes: int, marks: tuple[float, ...]) -> LostTime:
        """Return the time lost by a job of `nodes` that loses a node: until noticed, and the rest of the recovery.

        `marks` are random numbers in 0..1 that decide the moment, and whether only the lease shows the loss.
        """
        before, moment = max(nodes, 1), self._make_moment(marks, self.case.recovery.silent_share)
        case = self._case_for(before)
        seen_s = detection_s(case, moment, before)
        parts = recovery_parts(case, moment, before, max(before - 1, 1))
        return LostTime(seen_s, max(0.0, parts.total - seen_s))

    def fault_cost(self, nodes: int, marks: tuple[float, ...]) -> LostTime:
        """Return the time lost if a process of a job fails and starts again on its node.

        The connection shows the fault. Then come the process's start, a recovery with all nodes, and the repeated part
        of the step. `marks` are random numbers in 0..1.
        """
        held, moment = max(nodes, 1), self._make_moment(marks, 0.0)
        case = self._case_for(held)
        parts = recovery_parts(case, moment, held, held)
        again_s = marks[3] * case.job.step_s
        return LostTime(self.case.recovery.reset_s, self.warm_s + parts.total + again_s)

    def change_s(self, nodes: int) -> float:
        """Return the seconds of a planned change: `changed_s`, or a recovery without a failure."""
        held = max(nodes, 1)
        return (
            recovery_parts(self._case_for(held), None, held, held).total if self.changed_s is None else self.changed_s
        )

    def _case_for(self, nodes: int) -> FleetCase:
        return structs.replace(self.case, nodes=nodes, min_nodes=1)

    @staticmethod
    def _make_moment(marks: tuple[float, ...], silent_share: float) -> FailureMoment:
        return FailureMoment(silent=marks[0] < silent_share, word_age=marks[1], look=marks[2], phase=marks[3])


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """A system that keeps simulated jobs running through failures: ours, or one that it is compared with."""

    name: str
    #: How nodes are allocated. "pool": by our pool's `policy`. "hit": by section 7.5's rule, which changes only the job
    #: that a failure hits. "waits": likewise, but a job trains only with all its nodes.
    shares: Literal["pool", "hit", "waits"]
    times: SystemTimes
    #: the pool's policy, if `shares` is "pool"
    policy: str = ""
    #: FLOP/s relative to Megatron's on the same nodes
    efficiency: float = 1.0
    #: waiting nodes in addition to the pool's
    spares: int = 0
    #: assumptions about the system, as text for users
    assumes: tuple[str, ...] = ()


OWN = HoldfastTimes()
_OWN_ASSUMES = (
    "a recovery's parts as holdfast simulate --scale has them (NCCL groups by TrainMover's figures)",
    f"a failed process starts again in {WARM_S:.0f} s (TrainMover, Table 1); every other failure is of that kind",
    "a planned change costs a whole regroup, though groups are built during training",
)
_RULE = "section 7.5: the plan of waf at first; then only the job that is hit changes; a node that is back is its"


def _megatron_system(name: str, spares: int, more: str) -> System:
    """Return a system whose jobs train only with all their nodes, and notice a failed process after `HANG_S`.

    `spares` nodes replace lost ones. `more` is stated as an assumption.
    """
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


def _elastic_system(name: str, seen_s: float, resume_s: float, assumed: str) -> System:
    """Return a system in which a failure changes only the job that it hits.

    Lost nodes and failed processes cost the same: `seen_s` until noticed, then `resume_s`, as does a change of size.
    """
    stop = LostTime(seen_s, resume_s)
    return System(
        name=name,
        shares="hit",
        times=FixedTimes(loss=stop, process=stop, changed_s=resume_s),
        assumes=(assumed, "ASSUMED: another failure costs as much as a lost node, and the node stays", _RULE),
    )


def _pool_system(policy: str) -> System:
    return System(name=policy, shares="pool", policy=policy, times=OWN, assumes=_OWN_ASSUMES)


#: all systems by name: the pool's policies with our own times, and other systems
SYSTEMS: dict[str, System] = {
    **{policy: _pool_system(policy) for policy in POLICIES},
    "hit-only": System(name="hit-only", shares="hit", times=OWN, assumes=(*_OWN_ASSUMES, _RULE)),
    "megatron": _megatron_system("megatron", 0, "no spare: the job waits until its node is repaired"),
    "megatron-spare": _megatron_system("megatron-spare", 1, "one node more than the others have waits as a hot spare"),
    "bamboo": _elastic_system(
        "bamboo", NODE_SEEN_S, 2 * MINUTE_S, "ASSUMED: goes on 2 min after 5.7 s, nothing is computed again"
    ),
    "oobleck": _elastic_system(
        "oobleck", NODE_SEEN_S, 2 * MINUTE_S, "ASSUMED: goes on 2 min after 5.7 s, nothing is computed again"
    ),
    "varuna": _elastic_system(
        "varuna",
        NODE_SEEN_S,
        SET_UP_S + AGAIN_S,
        "ASSUMED: set up again (14 min, as Megatron) after 5.7 s, 15 min computed again from the checkpoint",
    ),
}


def find_system(name: str) -> System:
    """Return the simulated system with this name: a way for a pool to survive failures, ours or another's.

    Raises:
        BadInputError: the name is unknown; the message names `--policy`.
    """
    if name not in SYSTEMS:
        raise BadInputError(f"--policy {name}: it must be one of {', '.join(SYSTEMS)}")
    return SYSTEMS[name]


def list_assumptions(systems: Sequence[System]) -> list[str]:
    """Return the assumptions about some systems, each once, with the systems to which it applies."""
    texts = dict.fromkeys(text for system in systems for text in system.assumes)
    return [f"{', '.join(system.name for system in systems if text in system.assumes)}: {text}" for text in texts]


def with_efficiency(system: System, efficiency: float) -> System:
    """Return the system with another efficiency relative to Megatron's FLOP/s."""
    return replace(system, efficiency=efficiency)
