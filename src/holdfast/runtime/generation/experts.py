"""A session's experts: their moves when a generation is entered, and the work of all ranks after a step."""

from __future__ import annotations

import logging

from holdfast.clock import Clock
from holdfast.control.link.wire import TransferError
from holdfast.coordination.progress.loads import encode_loads
from holdfast.protocol.messages.progress import Activity
from holdfast.protocol.messages.worker import MAX_LOADS, Loads
from holdfast.protocol.plan import GenerationPlan
from holdfast.runtime.checkpoints.saver import ExpertRows
from holdfast.runtime.faults.dying_group import FaultingCommunicator
from holdfast.runtime.faults.orders import Faults
from holdfast.runtime.generation.resources import Groups, Resources, SharedContext
from holdfast.runtime.groups.communicator import HaltedError, PeerLostError
from holdfast.runtime.moe.expert_shards.job_experts import JobExperts
from holdfast.runtime.moe.expert_shards.migrate import CorruptExpertError
from holdfast.runtime.state.state import TrainingState

logger = logging.getLogger(__name__)


class SessionExperts:
    """Moves, compares and collects the experts of one worker. For the training thread."""

    def __init__(
        self, shared: SharedContext, experts: JobExperts, state: TrainingState, faults: Faults, clock: Clock
    ) -> None:
        self._shared = shared
        self._experts = experts
        self._state = state
        self._faults = faults
        self._clock = clock

    def move_experts(self, resources: Resources, plan: GenerationPlan, groups: Groups) -> bool:
        """Bind the experts to a generation's groups, and receive those that this worker will host in it.

        If the plan moves them during a step, only the placement is prepared here. Bytes and seconds are stored in
        `resources`. A transfer that fails or is corrupt, or a later exchange of tokens that fails, is reported as a
        failure; one that a Stop interrupts is not.

        Returns:
            True if the move is done. False if the generation is over, or has to end because the move failed.

        Raises:
            JobFailedError: the initial experts are needed, and no longer exist.
        """
        machine = self._shared.machine
        with self._shared.changed:
            step = machine.step
            change = None if self._shared.is_over(resources.generation) else machine.begin_move()
        if change is None or plan.expert_plan is None:
            return False
        started = self._clock.monotonic()
        world = groups.world
        moving = world
        if self._faults.is_due("moving", step):
            moving = FaultingCommunicator(world, self._faults, step, "moving")
        try:
            resources.moved_bytes = self._experts.enter_generation(world, plan.expert_plan, change, moving=moving)
        except (HaltedError, PeerLostError, CorruptExpertError) as error:
            self._shared.abandon_groups(groups, resources.generation, error)
            return False
        if change.fetch and not change.during_step:
            resources.moving_s = self._clock.monotonic() - started
        self._experts.state.on_void = lambda error: self._on_exchange_failed(resources, error)
        with self._shared.changed:
            return machine.end_move(resources.generation)

    def await_arrivals(self, generation: int) -> bool:
        """Wait for experts that arrive in the background of the step, take them over, and tell the machine.

        Experts that are refused are reported as a failure.

        Returns:
            True once they are taken over; at once if this worker receives none. False if the generation ends meanwhile,
            or because of the failure.
        """
        with self._shared.changed:
            resources = self._shared.resources.of(generation)
            parcels = resources.parcels if resources is not None else None
        if parcels is None or not parcels.is_receiving:
            return True
        self._shared.progress.start_activity(Activity.RECEIVING)
        if self._shared.wait_for(generation, lambda: parcels.has_ended or None) is None:
            return False
        try:
            parcels.hand_over()
        except TransferError as error:
            self._shared.report_failure(generation, f"received experts were refused: {error}")
            self._shared.wait_for(generation, lambda: None)
            return False
        machine = self._shared.machine
        with self._shared.changed:
            if self._shared.is_over(generation):
                return False
            self._shared.execute(
                machine.finish_background_transfer(received_bytes=parcels.nbytes, transfer_s=parcels.seconds)
            )
        self._shared.progress.start_activity(Activity.REDUCING)
        return True

    def verify_copies(self, groups: Groups, generation: int) -> bool:
        """Compare all copies of experts, on all ranks. If that is interrupted, the groups are retired, and a lost peer
        is reported.

        Returns:
            True if the copies are equal; False if the comparison was interrupted.

        Raises:
            ReplicasDifferError: copies differ; raised on all ranks.
        """
        try:
            self._experts.verify(groups.world)
        except (HaltedError, PeerLostError) as error:
            # If it was halted: the step is applied, and the next task finds the generation over.
            self._shared.abandon_groups(groups, generation, error)
            return False
        return True

    def rows_to_save(self) -> ExpertRows:
        """Return the experts that this worker saves: descriptions of all layers, and the live rows by name.

        Each expert is saved by one of its hosts; all ranks choose the same host.
        """
        return ExpertRows(specs=self._experts.describe_layers(), rows=self._experts.rows_to_save())

    def send_loads(self, *, step: int, generation: int) -> None:
        """Send the coordinator, every few steps, how many tokens each expert got, its size and its time per token.

        Only rank 0 calls it. All ranks know the same loads, and each report is complete, so the next rank 0 can
        continue. Nothing is sent for models with more than `MAX_LOADS` experts in total.
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
        self._shared.send(report)

    def _on_exchange_failed(self, resources: Resources, error: Exception) -> None:
        """Handle an exchange of tokens that was interrupted in the script's forward or backward pass.

        Retires the groups. A lost peer is reported; a Stop needs no report.
        """
        if resources.groups is not None:
            resources.groups.retire()
        if isinstance(error, PeerLostError):
            self._shared.report_failure(resources.generation, error)
