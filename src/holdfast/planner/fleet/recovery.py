"""How long the parts of one live recovery take, by the formulae that the keys of a case name.

The others go on computing until they hear of it, and finish the micro-batch that they are at, but no further than to
the step's reduction: what they compute meanwhile is not lost, and is taken off the parts in their order (all but redo).
A failure strikes at a share u of a step, even between 0 and 1.

detect: the coordinator learns of it. With probability silent_share only by the lease: lease_s, less the age of the
node's last word (even between 0 and the time between two: heartbeat_s, in jobs of many nodes more, as
`CoordinatorConfig.beat_s` says), plus the wait for the coordinator's next look (even between 0 and tick_s); else after
reset_s.
decide: decide_s + n decide_per_node_s: all members are told to stop, report, and the decision is taken.
tell: tell_s + n tell_per_node_s: the next generation is written down and told to all.
regroup: nccl_s + w nccl_per_worker_s (or gloo's): the group of w workers is built.
transfer: moved_bytes / bytes_per_s: what the lost node had and nobody else has in place.
redo: u (step on n nodes - step on those before): what the lost node had computed, shared out among the others; with
experts u times the whole step.
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
        """All of them."""
        return sum(astuple(self))


PARTS = tuple(part.name for part in fields(RecoveryParts))


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """When a failure strikes.

    silent: only the lease shows it. word_age, look: shares of the time between two words, and of tick_s. phase: the
    share of the step in progress that is done; None: nobody computes, as the job is recovering already.
    """

    silent: bool
    word_age: float
    look: float
    phase: float | None

    @classmethod
    def drawn(cls, case: FleetCase, rng: np.random.Generator, *, computing: bool) -> Moment:
        """Draw one."""
        silent, word_age, look, phase = rng.random(4)
        return cls(
            silent=silent < case.recovery.silent_share,
            word_age=word_age,
            look=look,
            phase=phase if computing else None,
        )


def detection_s(case: FleetCase, moment: Moment, nodes: int) -> float:
    """Return how long it takes until the coordinator of so many nodes knows."""
    times = case.recovery
    if not moment.silent:
        return times.reset_s
    config = CoordinatorConfig(spec=JobSpec(), lease_s=times.lease_s, heartbeat_s=times.heartbeat_s)
    return times.lease_s - moment.word_age * config.beat_s(nodes) + moment.look * times.tick_s


def computed_s(case: FleetCase, moment: Moment, before: int) -> float:
    """Return for how long the others compute that is of use, on `before` nodes, after one is gone."""
    if moment.phase is None:
        return 0.0
    step_s, micro_s = case.step_on(before), case.job.step_s / case.job.rounds
    at = moment.phase * step_s
    return min(ceil((at + detection_s(case, moment, before)) / micro_s) * micro_s, step_s) - at


def regroup_s(times: RecoveryCase, workers: int) -> float:
    """Return how long it takes to build the group of so many workers."""
    if times.groups == "nccl":
        return times.nccl_s + workers * times.nccl_per_worker_s
    return times.gloo_s + workers * times.gloo_per_worker_s


def recovery_parts(case: FleetCase, moment: Moment | None, before: int, after: int) -> RecoveryParts:
    """Return for how long a failure stops a job of `before` nodes that goes on with `after` of them.

    Args:
        moment: when the failure strikes; None: there is none, the job only goes on.
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
