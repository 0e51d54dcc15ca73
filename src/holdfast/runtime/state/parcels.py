"""Parts of the state that travel between any members at once, beside a step: each sender's share for each receiver.

A parcel goes as a state to a joiner does (`transfer`): over streams of its own, authenticated with the generation's key
and checksummed. It is read from live tensors, which do not change before all of them are `sent`, and lies in memory of
its own where it comes, until the training thread takes it.
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

#: to so many receivers a member sends at once
AT_ONCE = 4


class ParcelContents(Protocol):
    """What one member sends and gets; others are named by their ranks."""

    @property
    def receivers(self) -> Collection[int]: ...

    @property
    def senders(self) -> Collection[int]: ...

    def view(self, to: int) -> StateView: ...

    def prepare(self, source: int, manifest: Manifest) -> list[torch.Tensor]: ...

    def on_received(self, source: int, tensors: Sequence[torch.Tensor]) -> None: ...


class Parcels:
    """The parcels of one member in one generation."""

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
        """Prepare; `start` begins to send.

        Args:
            worker: whose they are.
            step: whose state is sent, and wanted.
            on_error: called from a thread if a parcel could not be sent: with the reason and the receiver.
            notify: called from a thread whenever `sent` or `ended` may have become true.
            midway: called in the midst of each stream's first chunk, at both ends.
            make_wire: what a connection is written and read by.
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
        """True once all receivers have everything."""
        return self._left == 0

    @property
    def is_receiving(self) -> bool:
        """True while something comes here, until it is taken."""
        return bool(self._contents.senders) and not self._taken

    @property
    def has_ended(self) -> bool:
        """True once all is here that was to come, or once that has become impossible."""
        with self._lock:
            ended = [receipt.has_ended for receipt in self._receivers.values()]
        return self._aborted or (len(ended) == len(self._contents.senders) and all(ended))

    @property
    def nbytes(self) -> int:
        """How much has come here."""
        return sum(receipt.nbytes for receipt in self._receivers.values())

    @property
    def seconds(self) -> float:
        """How long the slowest sender took for what came here."""
        return max((receipt.seconds for receipt in self._receivers.values()), default=0.0)

    def start(self) -> None:
        """Begin to send; returns at once."""
        for _ in range(min(AT_ONCE, len(self._waiting))):
            self._start_next()

    def abort(self) -> None:
        """Leave at once; what is not taken yet is void. Any thread; never blocks."""
        with self._lock:
            self._aborted = True
            self._waiting.clear()
            under_way = [*self._senders, *self._receivers.values()]
        for transfer in under_way:
            transfer.abort()

    def make_ticket(self, sender: int) -> Ticket | None:
        """Return what a member shows that may send something here; None where this one has nothing to send."""
        if sender not in self._contents.senders:
            return None
        return Ticket(plan=self._plan, sender=self._plan.workers[sender], receiver=self._worker, kind=PARCEL)

    def open_receiver(self, ticket: Ticket) -> StateReceiver | None:
        """A sender has shown who it is: return where its streams go, None where they come too late."""
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
        """Hand over what has come.

        Raises:
            TransferError: some of it has not, or is of another step.
        """
        with self._lock:
            receipts = dict(self._receivers)
        for rank in self._contents.senders:
            if rank not in receipts:
                raise TransferError("it was broken off")
            if (step := receipts[rank].result().step) != self._step:
                raise TransferError(f"{self._plan.workers[rank]} has sent experts of step {step}, not of {self._step}")
        self._taken = True
        for rank, receipt in receipts.items():
            self._contents.on_received(rank, receipt.tensors)
            receipt.release_tensors()

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
        """Begin to send to one more receiver, if there is one left."""
        with self._lock:
            push = self._waiting.pop(0) if self._waiting else None
            if push is not None:
                self._senders.append(push)
        if push is not None:
            push.start()

    def _on_sender_ended(self, error: str, receiver: str) -> None:
        if error:
            self._on_error(error, receiver)
            return
        with self._lock:
            self._left -= 1
        self._start_next()
        self._notify()
