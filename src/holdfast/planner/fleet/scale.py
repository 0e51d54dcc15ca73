"""Recovery time by the size of the job, part by part, as means over all moments at which a failure may strike."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import structs

from holdfast.planner.fleet.case import FleetCase
from holdfast.planner.fleet.recovery import PARTS, FailureMoment, RecoveryParts, detection_s, recovery_parts

SIZES = (4, 16, 64, 256, 1024, 4096, 16384)
#: Keys of a case, or groups of keys, without effect on the duration of a normal recovery.
OF_NO_EFFECT = (
    "standbys",
    "min_nodes",
    "mtbf_hours",
    "mttr_hours",
    "failure_shape",
    "repair_shape",
    "rack_nodes",
    "mtbf_rack_hours",
    "job.copies",
    "checkpoint",
    "recovery.join_s",
    "restart",
)
#: moments within a step at which parts are computed, for their mean
_MOMENTS = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleRow:
    """The recovery of a job of one size."""

    nodes: int
    #: seconds until the coordinator notices the failure; the other workers compute during most of it
    detected_s: float
    parts: RecoveryParts


def make_scale_rows(case: FleetCase, sizes: tuple[int, ...] = SIZES) -> list[ScaleRow]:
    """Return the parts for jobs of several sizes. All other values are the case's."""
    return [_make_row(structs.replace(case, nodes=nodes)) for nodes in sizes]


def mean_parts(case: FleetCase) -> RecoveryParts:
    """Return the mean parts of the full job's recovery from the failure of one node."""
    weighed = [
        (share / _MOMENTS, recovery_parts(case, moment, case.nodes, max(1, case.nodes - 1)))
        for share, silent in _failure_kinds(case)
        for moment in _spread_moments(silent=silent)
    ]
    return RecoveryParts(**{part: sum(weight * getattr(each, part) for weight, each in weighed) for part in PARTS})


def _make_row(case: FleetCase) -> ScaleRow:
    """Return the mean time to notice a failure and the mean parts of a recovery, for the full job of the case."""
    detected = sum(
        share * detection_s(case, _spread_moments(silent=silent)[0], case.nodes)
        for share, silent in _failure_kinds(case)
    )
    return ScaleRow(nodes=case.nodes, detected_s=detected, parts=mean_parts(case))


def _failure_kinds(case: FleetCase) -> tuple[tuple[float, bool], ...]:
    """Return the share of failures that only the lease shows, with True, and the share of the others, with False."""
    share = case.recovery.silent_share
    return ((share, True), (1.0 - share, False))


def _spread_moments(*, silent: bool) -> list[FailureMoment]:
    """Return moments that are evenly spread over a step, with the mean age of the heartbeat and the mean wait for a
    check.
    """
    phases = ((place + 0.5) / _MOMENTS for place in range(_MOMENTS))
    return [FailureMoment(silent=silent, word_age=0.5, look=0.5, phase=phase) for phase in phases]
