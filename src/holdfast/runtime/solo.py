"""A world of one: what the coordinator would say to the only worker of a job, without a coordinator."""

from __future__ import annotations

import logging
import queue
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

from holdfast.checkpoint_dir import DamagedCheckpointError, find_checkpoints, verify
from holdfast.control.framing import FromWorkerProcess
from holdfast.coordination.experts import everything
from holdfast.errors import JobFailedError
from holdfast.protocol import messages as msg

logger = logging.getLogger(__name__)


class SoloLink:
    """Answers a session as a coordinator would, so that a script alone runs through the same code."""

    def __init__(self, checkpoint_directory: Path | None = None) -> None:
        self._directory = checkpoint_directory
        self._damaged: dict[str, str] = {}
        self._plan: msg.EpochPlan | None = None
        self._orders: queue.SimpleQueue[msg.Order] = queue.SimpleQueue()

    def start(self, on_order: Callable[[msg.Order], None], on_lost: Callable[[], None]) -> None:
        """Hand orders to the session from a thread of their own, until the job is done."""

        def listen() -> None:
            order: msg.Order | None = None
            try:
                while not isinstance(order, msg.JobDone):
                    order = self._orders.get()
                    on_order(order)
            except BaseException:  # noqa: BLE001
                # As with an agent: a worker that no longer hears its orders must not live on in silence.
                traceback.print_exc()
                on_lost()

        threading.Thread(target=listen, name="holdfast-solo", daemon=True).start()

    def send(self, message: FromWorkerProcess) -> None:
        """Hear the worker.

        Raises:
            JobFailedError: no checkpoint can be read where there are some.
        """
        match message:
            case msg.Attach():
                self._plan = _plan(message)
                self._orders.put(msg.Begin(plan=self._plan, decision=self._decide()))
            case msg.Finished():
                self._orders.put(msg.JobDone())
            case msg.CheckpointWritten():
                self._orders.put(msg.AcceptCheckpoint(step=message.step, name=message.name))
            case msg.CheckpointDamaged() if self._plan is not None:
                self._damaged[message.name] = message.why
                decision = self._decide()
                self._orders.put(msg.Stop(term=self._plan.term, epoch=self._plan.epoch))
                self._plan = msgspec.structs.replace(self._plan, epoch=self._plan.epoch + 1)
                self._orders.put(msg.Begin(plan=self._plan, decision=decision))
            case _:
                pass

    def _decide(self) -> msg.Decision:
        """Resume from the newest checkpoint that can be read, or start where there is none at all."""
        for found in reversed(find_checkpoints(self._directory) if self._directory else []):
            try:
                step = self._verified(found.name)
            except DamagedCheckpointError as error:
                logger.warning("%s; the checkpoint before it is used", error)
                self._damaged[found.name] = str(error)
                continue
            return msg.Decision(kind=msg.DecisionKind.ROLLBACK, applied=step, checkpoint=found.name)
        if self._damaged:
            why = next(iter(self._damaged.values()))
            raise JobFailedError(f"no checkpoint in {self._directory} can be read: {why}")
        return msg.Decision(kind=msg.DecisionKind.START, applied=0)

    def _verified(self, name: str) -> int:
        """Return a checkpoint's step.

        Raises:
            DamagedCheckpointError: it is not whole, or could not be read before.
        """
        assert self._directory is not None
        if name in self._damaged:
            raise DamagedCheckpointError(self._damaged[name])
        return verify(self._directory / name)


def _plan(attach: msg.Attach) -> msg.EpochPlan:
    member = msg.Member(worker=attach.worker, host=attach.host, state_port=0)
    return msg.EpochPlan(term=1, epoch=1, members=(member,), experts=_all_here(attach.experts))


def _all_here(shape: msg.ExpertShape | None) -> msg.ExpertPlan | None:
    if shape is None:
        return None
    return msg.ExpertPlan(
        layers=shape.layers,
        experts=shape.experts,
        held=(b"",),
        placement=(everything(shape),),
        moves=0,
        asked=1,
        given=1,
    )
