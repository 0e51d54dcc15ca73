"""A session's state transfers: it sends state to members that lack it, and receives state if it lacks it itself."""

from __future__ import annotations

import socket
from functools import partial

import torch

from holdfast.control.link.wire import Wire
from holdfast.coordination.worker.tasks import Enter, Move
from holdfast.protocol.plan import GenerationPlan
from holdfast.runtime.faults.orders import Faults
from holdfast.runtime.generation.resources import Resources, SharedContext
from holdfast.runtime.snapshots.snapshots import Snapshots
from holdfast.runtime.state.parcels import ParcelContents, Parcels
from holdfast.runtime.state.receive import StateInbox, StateReceiver
from holdfast.runtime.state.state import Manifest, TrainingState
from holdfast.runtime.state.transfer import StateSender
from holdfast.runtime.state.wire import PARCEL, Offer, Ticket


class StateExchange:
    """Sends and receives the state of one worker."""

    def __init__(
        self,
        shared: SharedContext,
        state: TrainingState,
        faults: Faults,
        host: str,
        snapshots: Snapshots | None = None,
    ) -> None:
        """Create one; nothing is sent or received yet.

        Args:
            host: the address to receive at; "" if no peer can ever send state.
            snapshots: also read the state.
        """
        self._shared = shared
        self._state = state
        self._faults = faults
        self._snapshots = snapshots
        self._inbox = self._make_inbox(host) if host else None
        self._latest: StateReceiver | None = None

    def start(self) -> int:
        """Listen for senders; return the port, or 0 if no peer can ever send state."""
        return self._inbox.start() if self._inbox else 0

    def close(self) -> None:
        """Stop listening."""
        if self._inbox is not None:
            self._inbox.close()

    def _make_inbox(self, host: str) -> StateInbox:
        return StateInbox(host, admit=self._admit, open_receiver=self._open_receiver, make_wire=self._make_wire)

    def _make_wire(self, connection: socket.socket) -> Wire:
        """Return the stream of a connection; its traffic is reported to the agent."""
        return Wire(connection, self._shared.progress.add_moved_bytes)

    def await_quiet(self) -> bool:
        """Wait until no earlier transfer writes to the tensors; return False if one still does after a time-out."""
        return self._latest is None or self._latest.wait_inactive()

    def start_sending(self, resources: Resources, task: Move | Enter) -> None:
        """Send this worker's state to members that lack it, in the background. Compute may continue, apply waits.

        Does nothing if no member needs it, if it is already being sent, or if the generation is over.

        Args:
            task: names the members.

        Raises:
            BadInputError: the script changed an `extra` outside of `apply()`.
        """
        if not task.send_to or resources.push is not None:
            return
        self._state.watch.check_unchanged()
        view, step = self._state.capture(), self._shared.machine.step
        machine = self._shared.machine
        with self._shared.changed:
            if self._shared.is_over(resources.generation) or machine.applied is None:
                return
            # The callbacks must not refer to the resources: a reference cycle would keep the state for minutes.
            resources.push = StateSender(
                plan=task.plan,
                sender=machine.worker,
                receivers=task.send_to,
                view=view,
                step=machine.applied,
                passed=machine.history,
                on_end=partial(self._on_send_ended, resources.generation),
                midway=lambda: self._faults.strike_in_side_thread("transfer", step),
                make_wire=self._make_wire,
            )
            resources.push.start()

    def start_parcels(self, resources: Resources, plan: GenerationPlan, cargo: ParcelContents) -> None:
        """Start to send and receive experts in the background of a generation's first step. Apply waits for it.

        Does nothing if the generation is over.

        Args:
            cargo: the experts to send to and receive from each rank.
        """
        machine, step = self._shared.machine, self._shared.machine.step
        with self._shared.changed:
            if self._shared.is_over(resources.generation) or machine.applied is None:
                return
            resources.parcels = parcels = Parcels(
                cargo,
                plan=plan,
                worker=machine.worker,
                step=machine.applied,
                on_error=partial(self._on_send_ended, resources.generation),
                notify=self._shared.notify,
                midway=lambda: self._faults.strike_in_side_thread("moving", step),
                make_wire=self._make_wire,
            )
            self._shared.changed.notify_all()
        parcels.start()
        if not (cargo.receivers or cargo.senders):
            self._faults.strike_at("moving", step)

    def _on_send_ended(self, generation: int, error: str, receiver: str) -> None:
        """Report a failure of a transfer to `receiver`, if there was one, and wake the waiting threads.

        Args:
            error: "" if all was sent.
        """
        if error:
            self._shared.report_failure(generation, error, (receiver,))
        self._shared.notify()

    # ---- in the inbox's threads ----

    def _prepare_buffers(self, manifest: Manifest, *, aside: bool) -> list[torch.Tensor]:
        """Return the tensors to receive a state into: the live ones, or others if the old state must stay.

        Waits until shadow steps and snapshots no longer use the live ones.

        Args:
            aside: whether the old state must stay until the new one is complete.
        """
        warming = self._shared.machine.warming
        with self._shared.changed:
            # A shadow step still computes with the tensors that will be overwritten, until its micro-batch ends.
            self._shared.changed.wait_for(lambda: not warming.is_running)
        if self._snapshots is not None and not aside:
            self._snapshots.wait_copied()
        return self._state.prepare(manifest, separate=aside)

    def _admit(self, offer: Offer, wait_s: float) -> Ticket | None:
        """Return the ticket that tells who may send the offered state or experts to this worker; None to refuse.

        Waits up to `wait_s` seconds for the plan that names the senders. It is refused if the plan does not come, or
        names no sender for this worker.
        """
        machine, generation = self._shared.machine, offer.generation
        if offer.kind == PARCEL:
            with self._shared.changed:
                parcels = self._shared.changed.wait_for(lambda: self._find_parcels(generation), timeout=wait_s)
                return parcels.make_ticket(offer.sender) if parcels else None
        with self._shared.changed:
            self._shared.changed.wait_for(lambda: machine.generations.plan_of(generation) is not None, timeout=wait_s)
            plan = machine.generations.plan_of(generation)
            senders = plan.senders(machine.worker) if plan is not None else ()
            if plan is None or not senders:
                return None
            return Ticket(plan=plan, receiver=machine.worker, sender=senders[offer.stream % len(senders)])

    def _open_receiver(self, ticket: Ticket) -> StateReceiver | None:
        """Return the receiver for the streams of an authenticated sender, made on demand; None if they come too late.

        State is refused if this worker does not lack it; for experts, the receiver belongs to the generation's parcels.
        """
        generation, machine = ticket.plan.generation, self._shared.machine
        with self._shared.changed:
            if ticket.kind == PARCEL:
                parcels = self._find_parcels(generation)
                return parcels.open_receiver(ticket) if parcels is not None else None
            if not machine.accept_push(generation):
                return None
            resources = self._shared.resources.of(generation)
            if resources is None or resources.halt.is_set():
                return None
            if resources.receipt is None:
                step = machine.step
                resources.receipt = self._latest = StateReceiver(
                    ticket=ticket,
                    prepare=partial(self._prepare_buffers, aside=machine.keeps),
                    on_end=self._shared.notify,
                    midway=lambda: self._faults.strike_in_side_thread("receiving", step),
                    after=self._latest,
                )
            self._shared.changed.notify_all()
            return resources.receipt

    def _find_parcels(self, generation: int) -> Parcels | None:
        """Return the experts that travel in a generation, or None if the generation is over or they are not known yet.

        The caller holds the lock.
        """
        if self._shared.is_over(generation):
            return None
        resources = self._shared.resources.of(generation)
        return resources.parcels if resources is not None else None
