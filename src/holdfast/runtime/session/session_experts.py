"""A session's experts: what moves on entering a generation, and what all ranks do together after a step."""

from __future__ import annotations

import logging

from holdfast.clock import Clock
from holdfast.coordination.experts.loads import encode_loads
from holdfast.protocol.messages.progress import Activity
from holdfast.protocol.messages.worker import MAX_LOADS, Loads
from holdfast.protocol.plan import GenerationPlan
from holdfast.runtime.checkpoints.saver import CheckpointSaver, ExpertRows
from holdfast.runtime.faults.dying_group import FaultingCommunicator
from holdfast.runtime.faults.orders import Faults
from holdfast.runtime.groups.communicator import HaltedError, PeerLostError
from holdfast.runtime.moe.holding.job_experts import JobExperts
from holdfast.runtime.moe.holding.migrate import CorruptExpertError
from holdfast.runtime.session.resources import Groups, Resources, Shared
from holdfast.runtime.state.state import TrainingState

logger = logging.getLogger(__name__)


class SessionExperts:
    """Moves, compares and collects the experts of one worker; for the training thread."""

    def __init__(self, shared: Shared, experts: JobExperts, state: TrainingState, faults: Faults, clock: Clock) -> None:
        self._shared = shared
        self._experts = experts
        self._state = state
        self._faults = faults
        self._clock = clock

    def move(self, resources: Resources, plan: GenerationPlan, groups: Groups) -> bool:
        """Bring the experts here that this worker is to host; False where the generation is over, or has to end.

        Raises:
            JobFailedError: the initial experts are wanted, and are not here any more.
        """
        machine = self._shared.machine
        with self._shared.changed:
            step = machine.step
            change = None if self._shared.left(resources.generation) else machine.moving()
        if change is None or plan.expert_plan is None:
            return False
        started = self._clock.monotonic()
        domain = groups.domain
        moving = domain
        if self._faults.armed("moving", step):
            moving = FaultingCommunicator(domain, self._faults, step, "moving")
        try:
            resources.moved_bytes = self._experts.take_up(domain, plan.expert_plan, change, moving=moving)
        except HaltedError:
            groups.retire()
            return False
        except (PeerLostError, CorruptExpertError) as error:
            self._shared.progress.at(Activity.AWAITING)
            groups.retire()
            self._shared.lost(resources.generation, error)
            return False
        if change.bring:
            resources.moving_s = self._clock.monotonic() - started
        self._experts.state.on_void = lambda error: self._void(resources, error)
        with self._shared.changed:
            return machine.moved(resources.generation)

    def after_step(
        self,
        groups: Groups,
        saver: CheckpointSaver | None,
        *,
        step: int,
        origin: tuple[int, int],
        verify: bool,
        asked: bool,
    ) -> None:
        """Compare all copies if it is time to; if a checkpoint is due, bring the experts to rank 0, which saves them.

        Args:
            origin: term and generation under which the step was applied.
            asked: a checkpoint is due, whatever the step is.

        Raises:
            ReplicasDifferError: on all ranks.
        """
        try:
            if verify:
                self._experts.verify(groups.domain)
        except (HaltedError, PeerLostError) as error:
            self._broken_off(groups, origin[1], error)
            return
        if saver is not None and (asked or saver.due(step)):
            wanted = groups.world.rank == 0 and saver.free(step, wait=asked)
            self.save(groups, saver, step=step, origin=origin, wanted=wanted)

    def save(self, groups: Groups, saver: CheckpointSaver, *, step: int, origin: tuple[int, int], wanted: bool) -> None:
        """Bring the experts to rank 0, on all ranks; it saves them.

        Args:
            wanted: rank 0 can save them now; what the others say does not count.
        """
        try:
            rows = self._experts.gather(groups.domain, wanted=wanted)
        except (HaltedError, PeerLostError) as error:
            self._broken_off(groups, origin[1], error)
            return
        if rows is not None:
            saver.save(self._state, step, origin, ExpertRows(specs=self._experts.specs(), rows=rows))

    def _broken_off(self, groups: Groups, generation: int, error: Exception) -> None:
        self._shared.progress.at(Activity.AWAITING)
        groups.retire()  # (where they were halted: the step is applied, and what comes next finds the generation over)
        if isinstance(error, PeerLostError):
            self._shared.lost(generation, error)

    def tell_loads(self, *, step: int, generation: int) -> None:
        """Tell the coordinator every so many steps how the tokens are shared out; for rank 0 alone: all know the same.

        A report is whole in itself: whoever is rank 0 next has counted as well.
        """
        loads = self._experts.loads
        if step % self._experts.report_every or loads.size > MAX_LOADS:
            return
        report = Loads(
            worker=self._shared.machine.worker,
            generation=generation,
            step=step,
            tokens=encode_loads(loads),
            expert_bytes=self._experts.expert_bytes,
            token_s=self._experts.token_s,
        )
        self._shared.tell(report)

    def _void(self, resources: Resources, error: Exception) -> None:
        """An exchange of tokens was broken off in the user's forward or backward pass."""
        if resources.groups is not None:
            resources.groups.retire()
        if isinstance(error, PeerLostError):
            self._shared.lost(resources.generation, error)
