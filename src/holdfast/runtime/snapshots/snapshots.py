"""One worker's part in the tier in memory: it takes snapshots with all others, and goes back to one when told."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from holdfast.control.link.worker_settings import WorkerSettings
from holdfast.errors import BadInputError
from holdfast.protocol.messages.worker import SnapshotDamaged, SnapshotLeftOut, SnapshotTaken
from holdfast.protocol.plan import GenerationPlan
from holdfast.protocol.state import SnapshotPart, SnapshotSource
from holdfast.runtime.dtensor.place import WHOLE_REPLICA, ReplicaPosition
from holdfast.runtime.gradients.workload import Workload
from holdfast.runtime.moe.holding.job_experts import JobExperts
from holdfast.runtime.snapshots.kept_experts import stash_experts
from holdfast.runtime.snapshots.putting_away import stash_state
from holdfast.runtime.snapshots.restoring import SnapshotRestorer
from holdfast.runtime.snapshots.taking import SnapshotTaker
from holdfast.runtime.state.state import TrainingState

Send = Callable[[SnapshotTaken | SnapshotLeftOut | SnapshotDamaged], None]


class Snapshots:
    """For the training thread."""

    def __init__(
        self,
        *,
        folder: Path,
        job: str,
        worker: str,
        every: int,
        state: TrainingState,
        send: Send,
        experts: JobExperts | None = None,
        place: ReplicaPosition = WHOLE_REPLICA,
    ) -> None:
        """Take none yet.

        Args:
            folder: the agent's. every: steps between snapshots, 0: none. tell: sends to the coordinator; thread-safe.
            place: which part of a replica is here.
        """
        self._folder, self._job, self._worker, self._send = folder, job, worker, send
        self._state, self._experts, self._place = state, experts, place
        #: what the last state that was restored here has brought from other nodes
        self.moved_bytes = 0
        self._taker = SnapshotTaker(folder=folder, job=job, worker=worker, every=every, send=send, place=place)

    def on_step_applied(self, plan: GenerationPlan, step: int) -> None:
        """All members have applied a step under a plan: take a snapshot, if one is due."""
        self._taker.copy_if_due(self._state, self._experts, plan, step)

    def wait_copied(self) -> None:
        """The state is about to change: wait until nothing reads it."""
        self._taker.wait_copied()

    def restore(self, source: SnapshotSource, plan: GenerationPlan, rank: int) -> int:
        """Go back to a snapshot, and return its step.

        Raises:
            SnapshotLostError: that is not possible; why was told.
        """

        def complain(snapshot: SnapshotPart, node: str, why: str) -> None:
            self._send(
                SnapshotDamaged(
                    worker=self._worker, generation=plan.generation, snapshot=snapshot, node=node, why=why[:1024]
                )
            )

        restorer = SnapshotRestorer(self._folder, self._job, self._worker, complain, self._place)
        wanted: Sequence[Sequence[int]] = ()
        if self._experts is not None and plan.expert_plan is not None:
            wanted = self._experts.planned_experts(plan.expert_plan, rank)
        try:
            return restorer.restore(source, self._state, rank, self._experts, wanted)
        finally:
            self.moved_bytes = restorer.moved_bytes

    def stash(self, plan: GenerationPlan, step: int) -> None:
        """Put the state of a step into the memory of this node, and tell it: workers under another layout read it."""
        rank = plan.rank(self._worker) or 0
        part, apart = plan.stash_part(rank, step), plan.expert_stash_part(rank, step)
        if part is not None:  # (else another unit of this node does)
            self._write_stash(plan, part, partial(stash_state, self._state, self._place))
        if apart is not None and self._experts is not None and plan.expert_plan is not None:
            names = self._experts.planned_experts(plan.expert_plan, rank)
            self._write_stash(plan, apart, partial(stash_experts, self._experts, names))

    def _write_stash(
        self, plan: GenerationPlan, part: SnapshotPart, write: Callable[[Path, str, SnapshotPart], int]
    ) -> None:
        begun, step = time.monotonic(), part.step
        try:
            nbytes = write(self._folder, self._job, part)
        except (OSError, RuntimeError, BadInputError) as error:  # (torch's own are RuntimeErrors)
            self._send(
                SnapshotLeftOut(
                    worker=self._worker,
                    generation=plan.generation,
                    step=step,
                    why=f"the state cannot be put away: {error}"[:1024],
                    lasting=isinstance(error, BadInputError),
                )
            )
            return
        seconds = time.monotonic() - begun
        self._send(SnapshotTaken(worker=self._worker, snapshot=part, bytes=nbytes, seconds=seconds, stall_s=seconds))

    def wait(self) -> None:
        """Wait until this worker's part of the last one is whole, or left out."""
        self._taker.wait()

    def close(self) -> None:
        """Wait for what is under way."""
        self._taker.close()


def make_snapshots(
    settings: WorkerSettings | None, workload: Workload, send: Send, folder: str = ""
) -> Snapshots | None:
    """Return what a worker's settings ask for; None: no snapshots.

    Args:
        folder: the agent's, where the job may change its layout, whether or not any are taken every so many steps.
    """
    folder = folder or (settings.snapshots if settings is not None else "")
    if settings is None or not folder:
        return None
    return Snapshots(
        folder=Path(folder),
        job=settings.spec.name,
        worker=settings.worker,
        every=settings.spec.checkpoint.snapshot_every,
        state=workload.state,
        experts=workload.experts,
        send=send,
        place=workload.place,
    )
