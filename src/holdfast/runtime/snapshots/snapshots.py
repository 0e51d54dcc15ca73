"""One worker's part of the memory tier: it takes snapshots together with all other workers, and restores them."""

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
from holdfast.runtime.dtensor.replica_position import WHOLE_REPLICA, ReplicaPosition
from holdfast.runtime.gradients.workload import Workload
from holdfast.runtime.moe.expert_shards.job_experts import JobExperts
from holdfast.runtime.snapshots.restoring import SnapshotRestorer
from holdfast.runtime.snapshots.stashed_experts import stash_experts
from holdfast.runtime.snapshots.stashing import stash_state
from holdfast.runtime.snapshots.taking import SnapshotTaker
from holdfast.runtime.state.state import TrainingState

Send = Callable[[SnapshotTaken | SnapshotLeftOut | SnapshotDamaged], None]


class Snapshots:
    """Takes and restores snapshots; used by the training thread."""

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
        position: ReplicaPosition = WHOLE_REPLICA,
    ) -> None:
        """Start without a snapshot.

        Args:
            folder: the agent's.
            every: steps between snapshots, or 0 for none.
            send: sends a message to the coordinator; thread-safe.
            position: the part of a replica on this worker.
        """
        self._folder = folder
        self._job = job
        self._worker = worker
        self._send = send
        self._state = state
        self._experts = experts
        self._position = position
        #: bytes of the last restored state that came from other nodes
        self.moved_bytes = 0
        self._taker = SnapshotTaker(folder=folder, job=job, worker=worker, every=every, send=send, position=position)

    def on_step_applied(self, plan: GenerationPlan, step: int) -> None:
        """Take a snapshot, if one is due after a step that all members have applied under a plan."""
        self._taker.copy_if_due(self._state, self._experts, plan, step)

    def wait_copied(self) -> None:
        """Wait until no copy reads the state, before it changes."""
        self._taker.wait_copied()

    def restore(self, source: SnapshotSource, plan: GenerationPlan, rank: int) -> int:
        """Restore a snapshot as `SnapshotRestorer.restore`, with the experts that the plan gives to this rank, and
        return its step. Each copy that cannot be used is reported to the coordinator.

        Raises:
            SnapshotLostError: that is not possible; the reasons were sent to the coordinator.
        """

        def report_damage(snapshot: SnapshotPart, node: str, why: str) -> None:
            self._send(
                SnapshotDamaged(
                    worker=self._worker, generation=plan.generation, snapshot=snapshot, node=node, why=why[:1024]
                )
            )

        restorer = SnapshotRestorer(self._folder, self._job, self._worker, report_damage, self._position)
        wanted: Sequence[Sequence[int]] = ()
        if self._experts is not None and plan.expert_plan is not None:
            wanted = self._experts.planned_experts(plan.expert_plan, rank)
        try:
            return restorer.restore(source, self._state, rank, self._experts, wanted)
        finally:
            self.moved_bytes = restorer.moved_bytes

    def stash(self, plan: GenerationPlan, step: int) -> None:
        """Write the present state, of `step`, into this node's memory for workers under another layout: the dense
        state, unless another replica group of this node writes it, and the experts that this worker hosts. Each part is
        reported to the coordinator as taken or left out.
        """
        rank = plan.rank(self._worker) or 0
        part, apart = plan.stash_part(rank, step), plan.expert_stash_part(rank, step)
        if part is not None:  # Otherwise another replica group of this node stashes it.
            self._write_stash(plan, part, partial(stash_state, self._state, self._position))
        if apart is not None and self._experts is not None and plan.expert_plan is not None:
            names = self._experts.planned_experts(plan.expert_plan, rank)
            self._write_stash(plan, apart, partial(stash_experts, self._experts, names))

    def _write_stash(
        self, plan: GenerationPlan, part: SnapshotPart, write: Callable[[Path, str, SnapshotPart], int]
    ) -> None:
        """Write one part of a stash by `write`, and report it to the coordinator as taken, or after an error as left
        out with the reason. A BadInputError is reported as lasting: later attempts would fail, too.
        """
        started = time.monotonic()
        try:
            nbytes = write(self._folder, self._job, part)
        except (OSError, RuntimeError, BadInputError) as error:  # torch raises RuntimeError.
            self._send(
                SnapshotLeftOut(
                    worker=self._worker,
                    generation=plan.generation,
                    step=part.step,
                    why=f"the state cannot be stashed: {error}"[:1024],
                    lasting=isinstance(error, BadInputError),
                )
            )
            return
        seconds = time.monotonic() - started
        self._send(SnapshotTaken(worker=self._worker, snapshot=part, bytes=nbytes, seconds=seconds, stall_s=seconds))

    def wait(self) -> None:
        """Wait until this worker's part of the last snapshot is complete, or left out."""
        self._taker.wait()

    def close(self) -> None:
        """Wait for the snapshot in progress, and stop the thread."""
        self._taker.close()


def make_snapshots(
    settings: WorkerSettings | None, workload: Workload, send: Send, folder: str = ""
) -> Snapshots | None:
    """Return the snapshots of a worker whose agent has a folder for them, else None; also None without an agent.

    Args:
        settings: the agent's; None without an agent.
        folder: the agent's folder if the job may change its layout; "": the folder in `settings`, which is "" without
            periodic snapshots.
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
        position=workload.position,
    )
