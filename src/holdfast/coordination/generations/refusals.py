"""What comes of a v that was refused: the step is done again with nothing held, and of whom a second refusal is news.

One corrupt contribution must never end a job. Where gradients are kept (of a step that is done again after a failure)
it is kept with them; so nothing is held any more once v was refused, by whatever decisions follow, until the step is
applied, on whatever lineage. That is in the record, with the first generation that began so: an attempt of an older one
may be refused by some in time and told of by others later, after further failures, and is still the same refusal.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.protocol.messages.worker import Report
from holdfast.protocol.plan import Decision
from holdfast.protocol.record import Refusal


def refusal_after(before: Refusal | None, decision: Decision) -> Refusal | None:
    """Return the refusal that is in force once a decision is, of the one before; None: gradients may be kept."""
    return before if before is not None and before.step > decision.applied else None


def refused_anew(before: Refusal | None, reports: Iterable[Report]) -> int:
    """Return the step of which an attempt was refused that nobody had told of before, 0 where there is none."""
    step, clean_from = (before.step, before.clean_from) if before is not None else (0, 0)
    anew = (
        report.step for report in reports if report.refused and (report.step > step or report.refused >= clean_from)
    )
    return max(anew, default=0)


def refused_again(before: Refusal | None, reports: Iterable[Report]) -> bool:
    """Tell whether an attempt that began with nothing held was refused all the same: it will be every time."""
    if before is None:
        return False
    return any(_refused(report, before.step) >= before.clean_from for report in reports)


def _refused(report: Report, step: int) -> int:
    """Return the generation of the attempt at this step that a member refused, 0 where it refused none."""
    return report.refused if report.step == step else 0
