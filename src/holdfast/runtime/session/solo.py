"""A coordinator for a job with one worker, in this process."""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
import traceback
from collections.abc import Callable

import msgspec

from holdfast.control.link.framing import FromWorkerProcess
from holdfast.coordination.config import PeriodBounds
from holdfast.coordination.experts.blobs import encode_all_experts
from holdfast.coordination.generations.decisions import Verdict, decide
from holdfast.coordination.progress.checkpoints import KEPT
from holdfast.coordination.progress.saving_period import add_save, saving_period_s
from holdfast.errors import BadInputError, JobFailedError
from holdfast.protocol.checkpoints.directory import find_usable_checkpoints
from holdfast.protocol.checkpoints.names import CheckpointName, parse_name
from holdfast.protocol.commit import describe_too_many_skipped
from holdfast.protocol.job_spec import MAX_SKIPPED_STEPS
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.record import Saving
from holdfast.storage import Storage, error_text

logger = logging.getLogger(__name__)


class SoloLink:
    """Answers a session as a coordinator would, so that a script alone runs through the same code."""

    def __init__(
        self, storage: Storage | None = None, *, in_time: bool = False, now: Callable[[], float] = time.monotonic
    ) -> None:
        """Create a link; nothing is attached yet.

        Args:
            storage: the storage of checkpoints, if there is one.
            in_time: whether to request checkpoints by time.
            now: a clock, in seconds.
        """
        #: The session and both threads that write checkpoints send messages.
        self._lock = threading.Lock()
        self._storage = storage
        self._in_time = in_time and storage is not None
        self._now = now
        self._started_at = self._asked_at = now()
        self._saving = Saving()
        self._plan: msg.GenerationPlan | None = None
        #: the decision for the next generation, or None if it follows from the worker's report
        self._next_decision: msg.Decision | None = None
        #: the last step with a refused result
        self._refused_step = 0
        #: skipped steps in a row; steps that the loss scale explains do not count
        self._skipped = 0
        #: why the job ends once its state is saved; "" while it continues
        self._cause = ""
        self._checkpoints: list[CheckpointName] = []
        self._damaged: list[str] = []
        self._orders: queue.SimpleQueue[msg.Order] = queue.SimpleQueue()

    def start(self, on_order: Callable[[msg.Order], None], on_lost: Callable[[], None]) -> None:
        """Start a thread that passes orders to the session until the job is done.

        Args:
            on_lost: called if handling an order failed; the exception is printed.
        """

        def listen() -> None:
            """Pass orders to the session until JobDone. If that raises, print the exception and call `on_lost`."""
            order: msg.Order | None = None
            try:
                while not isinstance(order, msg.JobDone):
                    order = self._orders.get()
                    on_order(order)
            except BaseException:  # noqa: BLE001
                # As with an agent, a worker that no longer receives its orders must not continue.
                traceback.print_exc()
                on_lost()

        threading.Thread(target=listen, name="holdfast-solo", daemon=True).start()

    def send(self, message: FromWorkerProcess) -> None:
        """Handle a message of the worker, from any of its threads, and queue the orders that a coordinator would send.

        Raises:
            JobFailedError: there are checkpoints and none can be read, a step was refused twice, or too many steps in a
                row were skipped. The last two are raised once the state is saved.
            BadInputError: the checkpoint directory cannot be read.
        """
        with self._lock:
            self._handle(message)

    def _handle(self, message: FromWorkerProcess) -> None:
        """Answer a message with orders, as a coordinator of one worker.

        Begin at the newest checkpoint, begin the next generation after a stop, request and accept checkpoints, drop
        damaged ones, and end the job once it has finished. A refused step is repeated once; after a second refusal, or
        an error of the script in `after_apply`, a last generation saves the state. Messages that need no answer are
        ignored.

        Raises:
            JobFailedError: no checkpoint can be read; or the last generation has finished after refused or skipped
                steps.
            BadInputError: the checkpoint directory cannot be read.
        """
        match message:
            case msg.Attach():
                self._find_checkpoints()
                # Terms continue from those in the directory, so that new checkpoints are newer than all of them.
                term = 1 + max((name.term for name in self._checkpoints), default=0)
                self._plan = _make_plan(message, term, secrets.token_bytes(16))
                self._orders.put(msg.Begin(plan=self._plan, decision=self._decide()))
            case msg.Finished():
                if self._cause:
                    raise JobFailedError(self._cause)
                self._orders.put(msg.JobDone())
            case msg.ScriptFailed():
                self._stop(last=True)
            case msg.Report():
                self._begin_next_generation(message)
            case msg.VoteRefused():
                # An attempt of a single worker keeps nothing, so the second attempt repeats all of the first.
                again, self._refused_step = self._refused_step == message.step, message.step
                self._cause = f"{message.why}, twice" if again else ""
                self._stop(last=again)
            case msg.CheckpointWritten():
                self._orders.put(
                    msg.AcceptCheckpoint(
                        term=message.term,
                        generation=message.generation,
                        step=message.step,
                        name=message.name,
                        files=message.files,
                        seconds=message.seconds,
                        stall_s=message.stall_s,
                    )
                )
            case msg.CheckpointUnwritten():
                self._orders.put(msg.PruneCheckpoints(term=message.term, names=(message.name,)))
            case msg.CheckpointKept():
                self._on_checkpoint_kept(message)
            case msg.Applied():
                self._count_skipped(message)
                self._request_due_checkpoint()
            case msg.CheckpointDamaged() if self._plan is not None:
                self._discard_newest_checkpoint(message.why)
                self._next_decision = self._decide()
                self._stop()
            case _:
                pass

    def _count_skipped(self, applied: msg.Applied) -> None:
        """Count skipped steps in a row, and log the first one. After `MAX_SKIPPED_STEPS`, a last generation saves the
        state, and the job fails.

        Steps that the loss scale skips neither count nor end the row.
        """
        commit = applied.commit
        if not commit.skipped:
            self._skipped = 0
        elif commit.failed:  # a step skipped by the loss scale neither counts nor ends the row
            self._skipped += 1
        if commit.failed and self._skipped == 1:
            logger.warning("step %d was skipped: %s", applied.step, commit.why_skipped)
        if self._skipped == MAX_SKIPPED_STEPS:
            self._cause = describe_too_many_skipped(self._skipped, applied.step)
            self._stop(last=True)

    def _request_due_checkpoint(self) -> None:
        """Request a checkpoint if they are saved by time, and the best period has passed since the last one."""
        now = self._now()
        since, lived_s = max(self._saving.saved_at, self._asked_at), now - self._started_at
        if self._in_time and now - since >= saving_period_s(self._saving, lived_s, PeriodBounds()):
            self._asked_at = now
            self._orders.put(msg.AskCheckpoint(if_free=True))

    def _stop(self, *, last: bool = False) -> None:
        """Order the worker to stop the generation in force. The next one begins after its report.

        Args:
            last: whether the next generation only saves the state, and finishes; stays set once it was.
        """
        plan = self._plan
        assert plan is not None
        self._plan = msgspec.structs.replace(plan, last=plan.last or last)
        self._orders.put(msg.Stop(term=plan.term, generation=plan.generation))

    def _begin_next_generation(self, report: msg.Report) -> None:
        """Begin the next generation from the worker's report: it may have applied further steps before the Stop.

        It continues from the worker's own state, unless `_next_decision` names another source.
        """
        plan, decision = self._plan, self._next_decision
        assert plan is not None
        if decision is None:
            verdict = decide(None, 0, [report], ())
            assert isinstance(verdict, Verdict)
            decision = verdict.decision
            experts = plan.expert_plan
            held = msgspec.structs.replace(experts, held=experts.placement) if experts else None
            plan = msgspec.structs.replace(plan, expert_plan=held)
        self._plan = msgspec.structs.replace(plan, generation=plan.generation + 1)
        self._next_decision = None
        self._orders.put(msg.Begin(plan=self._plan, decision=decision))

    def _find_checkpoints(self) -> None:
        """Find the usable checkpoints of an earlier run, and the errors of the damaged ones. Do nothing without a
        checkpoint directory.

        Raises:
            BadInputError: the directory cannot be read.
        """
        if self._storage is None:
            return
        damaged: list[str] = []
        try:
            self._checkpoints = find_usable_checkpoints(self._storage, lambda error: damaged.append(str(error)))
        except OSError as error:
            raise BadInputError(
                f"the checkpoint directory {self._storage.where} cannot be read: {error_text(error)}"
            ) from None
        self._damaged = damaged

    def _discard_newest_checkpoint(self, why: str) -> None:
        """Use the checkpoint before the newest one from now on: it cannot be read, although its files are complete."""
        self._checkpoints.pop()
        self._damaged.append(why)

    def _on_checkpoint_kept(self, kept: msg.CheckpointKept) -> None:
        """Accept a checkpoint, and order the removal of all except the newest `KEPT`.

        An older one may be sealed after a newer one.
        """
        self._orders.put(
            msg.AcceptCheckpoint(term=kept.term, generation=kept.generation, step=kept.step, name=kept.name)
        )
        self._saving = add_save(self._saving, self._now(), kept.stall_s)
        self._checkpoints = sorted([*self._checkpoints, parse_name(kept.name)])
        self._checkpoints, old = self._checkpoints[-KEPT:], self._checkpoints[:-KEPT]
        if old:
            names = tuple(name.folder for name in old[-msg.MAX_PRUNED :])
            self._orders.put(msg.PruneCheckpoints(term=kept.term, names=names))

    def _decide(self) -> msg.Decision:
        """Return the decision to resume from the newest readable checkpoint, or to start if no checkpoint exists.

        Damaged checkpoints are logged.

        Raises:
            JobFailedError: there are checkpoints, and none can be read.
        """
        if self._checkpoints:
            for why in self._damaged:
                logger.warning("%s; the checkpoint before it is used", why)
            newest = self._checkpoints[-1]
            source = msg.CheckpointSource(name=newest.folder)
            return msg.Decision(kind=msg.DecisionKind.ROLLBACK, applied=newest.step, source=source)
        if self._damaged:
            raise JobFailedError(
                f"no checkpoint in {self._storage.where if self._storage else ''} can be read: {self._damaged[0]}"
            )
        return msg.Decision(kind=msg.DecisionKind.START, applied=0)


def _make_plan(attach: msg.Attach, term: int, secret: bytes) -> msg.GenerationPlan:
    """Return the plan of generation 1 with this worker as its only member, which hosts all experts."""
    member = msg.Member(worker=attach.worker, host=attach.host, state_port=0)
    return msg.GenerationPlan(
        term=term, generation=1, members=(member,), expert_plan=_place_all_experts(attach.expert_shape), secret=secret
    )


def _place_all_experts(shape: msg.ExpertShape | None) -> msg.ExpertPlan | None:
    """Return the plan in which one worker hosts all experts and receives none; None without experts."""
    if shape is None:
        return None
    return msg.ExpertPlan(
        layers=shape.layers,
        experts=shape.experts,
        held=(b"",),
        placement=(encode_all_experts(shape),),
        moves=0,
        asked=1,
        given=1,
    )
