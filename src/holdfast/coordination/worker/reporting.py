"""Messages of a worker about its state: the report after a Stop, and the message after it has entered a generation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from holdfast.coordination.worker.comparison import ReplicaComparison
from holdfast.coordination.worker.copy import StateCopy
from holdfast.coordination.worker.tasks import SendToCoordinator, WorkerInstruction
from holdfast.protocol.messages.orders import Stop
from holdfast.protocol.messages.worker import Entered, ReceivedSteps, Report
from holdfast.protocol.plan import Phase
from holdfast.protocol.state import Holding

if TYPE_CHECKING:
    from holdfast.coordination.experts.worker_experts import HeldExperts


def make_report(
    worker: str,
    stop: Stop,
    copy: StateCopy,
    holding: HeldExperts | None,
    phase: Phase,
    summed: Iterable[int],
    generation: int,
    comparison: ReplicaComparison,
) -> Report:
    """Return the report of a worker. The report is a promise: the worker must not advance until the next Begin.

    Args:
        holding: The worker's experts. They are reported only together with the rest of the state.
        summed: The micro-batches of the step in progress with local gradients.
        generation: The generation in which the worker reached its phase.
        comparison: Has the fingerprint of the worker.
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
        compared=comparison.reported_fingerprint(copy.step),
    )


def entered_messages(
    worker: str, generation: int, copy: StateCopy, received_bytes: int, transfer_s: float
) -> list[WorkerInstruction]:
    """Return the messages of a worker that has entered a generation completely."""
    entered = Entered(
        worker=worker,
        generation=generation,
        applied=copy.applied or 0,
        received_bytes=received_bytes,
        transfer_s=transfer_s,
    )
    return [*known_steps_messages(worker, copy), SendToCoordinator(entered)]


def known_steps_messages(worker: str, copy: StateCopy) -> list[SendToCoordinator]:
    """Return a message with the steps that came with a received state, once."""
    sent, copy.sent = copy.sent, ()
    return [SendToCoordinator(ReceivedSteps(worker=worker, passed=sent))] if sent else []
