"""What a worker answers to Stop: where it stands, which state it has, and which it could make of what is reduced.

And what it tells once it is in a generation with all that belongs to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from holdfast.coordination.worker.comparing import ReplicaComparison
from holdfast.coordination.worker.copy import StateCopy
from holdfast.coordination.worker.tasks import Tell, WorkerInstruction
from holdfast.protocol.messages.orders import Stop
from holdfast.protocol.messages.worker import Entered, KnownSteps, Report
from holdfast.protocol.plan import Phase
from holdfast.protocol.state import Holding

if TYPE_CHECKING:
    from holdfast.coordination.experts.holding import HeldExperts


def report_of(
    worker: str,
    stop: Stop,
    copy: StateCopy,
    holding: HeldExperts | None,
    phase: Phase,
    summed: Iterable[int],
    generation: int,
    comparison: ReplicaComparison,
) -> Report:
    """Return the report of a worker, which must keep to it.

    Args:
        holding: its experts; those without the rest of the state are of no use to anybody.
        summed: the micro-batches of the step in progress whose gradients are here.
        generation: in which it has come to where it stands.
        comparison: has its fingerprint.
    """
    here, ready = copy.applied is not None, copy.reduced is not None
    return Report(
        worker=worker,
        term=stop.term,
        generation=stop.generation,
        applied=copy.applied,
        step=copy.step,
        phase=phase,
        fresh=copy.fresh,
        passed=copy.passed,
        summed=tuple(sorted(summed)),
        state=Holding(dense=here, experts=holding.blob if holding is not None and here else b""),
        result=Holding(experts=holding.next_blob if holding is not None else b"") if ready else None,
        reduced=copy.reduced,
        refused=generation if phase is Phase.REFUSED and not comparison.differs else 0,
        compared=comparison.reported_at(copy.step),
    )


def tell_entered(
    worker: str, generation: int, copy: StateCopy, received_bytes: int, transfer_s: float
) -> list[WorkerInstruction]:
    """Return what to tell of a worker that is in a generation."""
    entered = Entered(
        worker=worker,
        generation=generation,
        applied=copy.applied or 0,
        received_bytes=received_bytes,
        transfer_s=transfer_s,
    )
    return [*what_was_sent(worker, copy), Tell(entered)]


def what_was_sent(worker: str, copy: StateCopy) -> list[Tell]:
    """Return what to tell of the steps that have come with a worker's state, once."""
    sent, copy.sent = copy.sent, ()
    return [Tell(KnownSteps(worker=worker, passed=sent))] if sent else []
