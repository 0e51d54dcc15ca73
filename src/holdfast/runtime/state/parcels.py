"""Transfers of experts between any members during a step: one parcel from each sender to each receiver.

A parcel is sent like a state to a joiner (`transfer`): over its own streams, authenticated with the generation's key,
and with checksums. It is read from live tensors, which do not change before all parcels are `sent`. It is received into
separate memory, until the training thread takes it over.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Protocol

import torch

from holdfast.control.link.wire import TransferError, Wire
from holdfast.protocol.plan import GenerationPlan
from holdfast.runtime.state.receive import StateReceiver
from holdfast.runtime.state.state import Manifest, StateView
from holdfast.runtime.state.transfer import StateSender
from holdfast.runtime.state.wire import PARCEL, Ticket

#: number of receivers that a member sends to at the same time
AT_ONCE = 4


class ParcelContents(Protocol):
    """The tensors that one member sends and receives; other members are identified by their ranks."""

    @property
    def receivers(self) -> Collection[int]: ...

    @property
    def senders(self) -> Collection[int]: ...

    def view(self, to: int) -> StateView: ...

    def prepare(self, source: int, manifest: Manifest) -> list[torch.Tensor]: ...

    def on_received(self, source: int, tensors: Sequence[torch.Tensor]) -> None: ...


class Parcels:
    """Transfers one member's experts to and from other members, in the background of one generation's first step."""

    def __init__(
        self,
        contents: ParcelContents,
        *,
        plan: GenerationPlan,
        worker: str,
        step: int,
        on_error: Callable[[str, str], None],
        notify: Callable[[], None],
        midway: Callable[[], None] = lambda: None,
        make_wire: Callable[[socket.socket], Wire] = Wire,
    ) -> None:
        """Prepare; `start` starts to send.

        Args:
            worker: this member.
            step: the step of the states that are sent and received.
            on_error: called from a thread if a parcel could not be sent, with the reason and the receiver.
            notify: called from a thread whenever `sent` or `has_ended` may have become true.
            midway: called during each stream's first chunk, at both ends.
            make_wire: makes the reader and writer of a connection.
        """
        self._contents = contents
        self._plan = plan
        self._worker = worker
        self._step = step
        self._on_error = on_error
        self._notify = notify
        self._midway = midway
        self._lock = threading.Lock()
        self._waiting = [self._make_sender(rank, make_wire) for rank in contents.receivers]
        self._senders: list[StateSender] = []
        self._left = len(self._waiting)
        self._receivers: dict[int, StateReceiver] = {}
        self._aborted = self._taken = False

    @property
    def sent(self) -> bool:
        """Whether all receivers have all parcels."""
        return self._left == 0

    @property
    def is_receiving(self) -> bool:
        """Whether parcels come to this member and are not yet handed over."""
        return bool(self._contents.senders) and not self._taken

    @property
    def has_ended(self) -> bool:
        """Whether all parcels for this member are received, or can no longer be received."""
        with self._lock:
            ended = [receiver.has_ended for receiver in self._receivers.values()]
        return self._aborted or (len(ended) == len(self._contents.senders) and all(ended))

    @property
    def nbytes(self) -> int:
        """The received bytes."""
        return sum(receiver.nbytes for receiver in self._receivers.values())

    @property
    def seconds(self) -> float:
        """Seconds that the slowest sender took."""
        return max((receiver.seconds for receiver in self._receivers.values()), default=0.0)

    def start(self) -> None:
        """Start to send; returns at once."""
        for _ in range(min(AT_ONCE, len(self._waiting))):
            self._start_next()

    def abort(self) -> None:
        """Break off all transfers of experts to and from this member; received ones that are not handed over are void.
        Any thread; never blocks.
        """
        with self._lock:
            self._aborted = True
            self._waiting.clear()
            transfers = [*self._senders, *self._receivers.values()]
        for transfer in transfers:
            transfer.abort()

    def make_ticket(self, sender: int) -> Ticket | None:
        """Return the ticket of a member's parcel to this one, or None if the member has none to send."""
        if sender not in self._contents.senders:
            return None
        return Ticket(plan=self._plan, sender=self._plan.workers[sender], receiver=self._worker, kind=PARCEL)

    def open_receiver(self, ticket: Ticket) -> StateReceiver | None:
        """Return the receiver of a sender's parcel, one for all its streams; None after `abort`. The sender is
        authenticated.
        """
        rank = self._plan.rank(ticket.sender)
        assert rank is not None
        with self._lock:
            if self._aborted:
                return None
            if rank not in self._receivers:
                self._receivers[rank] = StateReceiver(
                    ticket=ticket,
                    prepare=partial(self._contents.prepare, rank),
                    on_end=self._notify,
                    midway=self._midway,
                )
            return self._receivers[rank]

    def hand_over(self) -> None:
        """Pass the tensors of all received parcels to the contents, and drop them here.

        Raises:
            TransferError: a parcel is missing, or is of another step.
        """
        with self._lock:
            receivers = dict(self._receivers)
        for rank in self._contents.senders:
            if rank not in receivers:
                raise TransferError("it was broken off")
            if (step := receivers[rank].result().step) != self._step:
                raise TransferError(f"{self._plan.workers[rank]} has sent experts of step {step}, not of {self._step}")
        self._taken = True
        for rank, receiver in receivers.items():
            self._contents.on_received(rank, receiver.tensors)
            receiver.release_tensors()

    def _make_sender(self, rank: int, make_wire: Callable[[socket.socket], Wire]) -> StateSender:
        return StateSender(
            plan=self._plan,
            sender=self._worker,
            receivers=(self._plan.workers[rank],),
            view=self._contents.view(rank),
            step=self._step,
            passed=(),
            on_end=self._on_sender_ended,
            midway=self._midway,
            make_wire=make_wire,
            kind=PARCEL,
        )

    def _start_next(self) -> None:
        """Start to send to the next receiver that waits, if there is one."""
        with self._lock:
            push = self._waiting.pop(0) if self._waiting else None
            if push is not None:
                self._senders.append(push)
        if push is not None:
            push.start()

    def _on_sender_ended(self, error: str, receiver: str) -> None:
        """Handle the end of one parcel's transfer: report an error, or count it as sent and start the next one."""
        if error:
            self._on_error(error, receiver)
            return
        with self._lock:
            self._left -= 1
        self._start_next()
        self._notify()
