"""Durations of the parts of one live recovery, by the formulae that the keys of a case name.

The remaining workers compute until they are stopped. They finish the current micro-batch, but stop before the step's
reduction. The work done meanwhile is kept, so its time is subtracted from the parts in their order, except from redo. A
failure strikes after a share u of a step, uniform in 0..1.

detect: the coordinator notices the failure, after reset_s. With probability silent_share only the lease shows it:
lease_s, minus the age of the node's last heartbeat, plus the wait for the coordinator's next check. The age is uniform
between 0 and the heartbeat period: heartbeat_s, or more in jobs of many nodes (`CoordinatorConfig.beat_s`). The wait is
uniform between 0 and tick_s.

decide: decide_s + n decide_per_node_s. All members are stopped and report, and the coordinator decides.

tell: tell_s + n tell_per_node_s. The plan of the next generation is written to the store and sent to all members.

regroup: nccl_s + w nccl_per_worker_s, or the same with gloo's constants. The group of w workers is built.

transfer: moved_bytes / bytes_per_s. State of which the lost node had the only copy in place is moved.

redo: u (step on n nodes - step on the nodes before). The others share the work of the lost node. With experts, u times
the whole step.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from math import ceil

import numpy as np

from holdfast.coordination.config import CoordinatorConfig
from holdfast.planner.fleet.case import FleetCase, RecoveryCase
from holdfast.protocol.job_spec import JobSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryParts:
    """Seconds of training that are lost, in the order in which they pass."""

    detect: float
    decide: float
    tell: float
    regroup: float
    transfer: float
    redo: float

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return sum(astuple(self))


PARTS = tuple(part.name for part in fields(RecoveryParts))


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureMoment:
    """The moment within a step and between checkpoints at which a simulated failure strikes."""

    #: whether only the lease shows the failure
    silent: bool
    #: age of the node's last heartbeat, as a share of the heartbeat period
    word_age: float
    #: wait for the coordinator's next check, as a share of tick_s
    look: float
    #: share of the current step that is done, or None if no worker computes because the job is already recovering
    phase: float | None

    @classmethod
    def draw(cls, case: FleetCase, rng: np.random.Generator, *, computing: bool) -> FailureMoment:
        """Draw a random moment. `computing` is False if the job is already recovering; the moment then has no phase."""
        silent, word_age, look, phase = rng.random(4)
        return cls(
            silent=silent < case.recovery.silent_share,
            word_age=word_age,
            look=look,
            phase=phase if computing else None,
        )


def detection_s(case: FleetCase, moment: FailureMoment, nodes: int) -> float:
    """Return the seconds until the coordinator of this many nodes notices the failure.

    That is `reset_s` if the connection shows it. A silent failure is noticed at the coordinator's first check after the
    node's lease, counted from its last heartbeat, is over. The heartbeat period depends on `nodes`.
    """
    times = case.recovery
    if not moment.silent:
        return times.reset_s
    config = CoordinatorConfig(spec=JobSpec(), lease_s=times.lease_s, heartbeat_s=times.heartbeat_s)
    return times.lease_s - moment.word_age * config.beat_s(nodes) + moment.look * times.tick_s


def computed_s(case: FleetCase, moment: FailureMoment, before: int) -> float:
    """Return the seconds of useful work that the remaining nodes of `before` still do after a failure.

    They compute until the failure is noticed, then finish the micro-batch, at most to the end of the step. It is 0 if
    the job was already recovering.
    """
    if moment.phase is None:
        return 0.0
    step_s, micro_s = case.step_on(before), case.job.step_s / case.job.rounds
    at = moment.phase * step_s
    return min(ceil((at + detection_s(case, moment, before)) / micro_s) * micro_s, step_s) - at


def regroup_s(times: RecoveryCase, workers: int) -> float:
    """Return the seconds that it takes to build a group of this many workers with the case's backend, nccl or gloo."""
    if times.groups == "nccl":
        return times.nccl_s + workers * times.nccl_per_worker_s
    return times.gloo_s + workers * times.gloo_per_worker_s


def recovery_parts(case: FleetCase, moment: FailureMoment | None, before: int, after: int) -> RecoveryParts:
    """Return the seconds that each part stops a job that goes from `before` nodes to `after`.

    The useful work that is still done after the failure is subtracted from the parts in their order, except from redo.

    Args:
        moment: when the failure strikes, or None for a recovery without a failure; detect and redo are then 0.
    """
    times = case.recovery
    again = case.step_on(after) if case.job.experts else case.step_on(after) - case.step_on(before)
    passing = {
        "detect": detection_s(case, moment, before) if moment else 0.0,
        "decide": times.decide_s + after * times.decide_per_node_s,
        "tell": times.tell_s + after * times.tell_per_node_s,
        "regroup": regroup_s(times, after * case.workers_per_node),
        "transfer": case.job.moved_bytes / times.bytes_per_s,
    }
    computed = computed_s(case, moment, before) if moment else 0.0
    for part, seconds in passing.items():
        passing[part] = max(0.0, seconds - computed)
        computed = max(0.0, computed - seconds)
    return RecoveryParts(**passing, redo=(moment.phase or 0.0) * again if moment else 0.0)
