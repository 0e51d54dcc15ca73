"""Refused step results: repeat the step with no gradients kept, and detect repeated refusals.

One corrupt contribution must never end a job. If gradients are kept (for a step that is repeated after a failure), the
corrupt one is kept, too. So after a refusal, nothing is kept until the step is applied, on any lineage. The record has
the refused step and the first generation without kept gradients. Reports of attempts in older generations may arrive
late, after further failures. They belong to the same refusal.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.protocol.messages.worker import Report
from holdfast.protocol.plan import Decision
from holdfast.protocol.record import Refusal


def refusal_after(before: Refusal | None, decision: Decision) -> Refusal | None:
    """Return the recorded refusal if its step is not applied by this decision, or None: then gradients may be kept."""
    return before if before is not None and before.step > decision.applied else None


def refused_anew(before: Refusal | None, reports: Iterable[Report]) -> int:
    """Return the step of a refusal that is not in the record yet, or 0: a later step, or a clean attempt that was
    refused again.
    """
    step, clean_from = (before.step, before.clean_from) if before is not None else (0, 0)
    anew = (
        report.step for report in reports if report.refused and (report.step > step or report.refused >= clean_from)
    )
    return max(anew, default=0)


def refused_again(before: Refusal | None, reports: Iterable[Report]) -> bool:
    """Return whether an attempt without kept gradients was also refused: then every attempt will be.

    Args:
        before: the recorded refusal, whose step is repeated; without one, the result is False.
    """
    if before is None:
        return False
    return any(_refused(report, before.step) >= before.clean_from for report in reports)


def _refused(report: Report, step: int) -> int:
    """Return the generation of the attempt at this step that a member refused, or 0."""
    return report.refused if report.step == step else 0
