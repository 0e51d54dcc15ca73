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
from holdfast.runtime.state.receive import Receipt
from holdfast.runtime.state.state import Manifest, StateView
from holdfast.runtime.state.transfer import Push
from holdfast.runtime.state.wire import PARCEL, Ticket

#: to so many receivers a member sends at once
AT_ONCE = 4


class Cargo(Protocol):
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
        cargo: Cargo,
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
        self._cargo = cargo
        self._plan = plan
        self._worker = worker
        self._step = step
        self._on_error = on_error
        self._notify = notify
        self._midway = midway
        self._lock = threading.Lock()
        self._waiting = [self._push(rank, make_wire) for rank in cargo.receivers]
        self._pushes: list[Push] = []
        self._left = len(self._waiting)
        self._receipts: dict[int, Receipt] = {}
        self._aborted = self._taken = False

    @property
    def sent(self) -> bool:
        """True once all receivers have everything."""
        return self._left == 0

    @property
    def awaits(self) -> bool:
        """True while something comes here, until it is taken."""
        return bool(self._cargo.senders) and not self._taken

    @property
    def ended(self) -> bool:
        """True once all is here that was to come, or once that has become impossible."""
        with self._lock:
            ended = [receipt.ended for receipt in self._receipts.values()]
        return self._aborted or (len(ended) == len(self._cargo.senders) and all(ended))

    @property
    def nbytes(self) -> int:
        """How much has come here."""
        return sum(receipt.nbytes for receipt in self._receipts.values())

    @property
    def seconds(self) -> float:
        """How long the slowest sender took for what came here."""
        return max((receipt.seconds for receipt in self._receipts.values()), default=0.0)

    def start(self) -> None:
        """Begin to send; returns at once."""
        for _ in range(min(AT_ONCE, len(self._waiting))):
            self._next()

    def abort(self) -> None:
        """Leave at once; what is not taken yet is void. Any thread; never blocks."""
        with self._lock:
            self._aborted = True
            self._waiting.clear()
            under_way = [*self._pushes, *self._receipts.values()]
        for transfer in under_way:
            transfer.abort()

    def ticket(self, sender: int) -> Ticket | None:
        """Return what a member shows that may send something here; None where this one has nothing to send."""
        if sender not in self._cargo.senders:
            return None
        return Ticket(plan=self._plan, sender=self._plan.workers[sender], receiver=self._worker, kind=PARCEL)

    def receipt(self, ticket: Ticket) -> Receipt | None:
        """A sender has shown who it is: return where its streams go, None where they come too late."""
        rank = self._plan.rank(ticket.sender)
        assert rank is not None
        with self._lock:
            if self._aborted:
                return None
            if rank not in self._receipts:
                self._receipts[rank] = Receipt(
                    ticket=ticket,
                    prepare=partial(self._cargo.prepare, rank),
                    on_end=self._notify,
                    midway=self._midway,
                )
            return self._receipts[rank]

    def take(self) -> None:
        """Hand over what has come.

        Raises:
            TransferError: some of it has not, or is of another step.
        """
        with self._lock:
            receipts = dict(self._receipts)
        for rank in self._cargo.senders:
            if rank not in receipts:
                raise TransferError("it was broken off")
            if (step := receipts[rank].result().step) != self._step:
                raise TransferError(f"{self._plan.workers[rank]} has sent experts of step {step}, not of {self._step}")
        self._taken = True
        for rank, receipt in receipts.items():
            self._cargo.on_received(rank, receipt.tensors)
            receipt.let_go()

    def _push(self, rank: int, make_wire: Callable[[socket.socket], Wire]) -> Push:
        return Push(
            plan=self._plan,
            sender=self._worker,
            receivers=(self._plan.workers[rank],),
            view=self._cargo.view(rank),
            step=self._step,
            passed=(),
            on_end=self._ended,
            midway=self._midway,
            make_wire=make_wire,
            kind=PARCEL,
        )

    def _next(self) -> None:
        """Begin to send to one more receiver, if there is one left."""
        with self._lock:
            push = self._waiting.pop(0) if self._waiting else None
            if push is not None:
                self._pushes.append(push)
        if push is not None:
            push.start()

    def _ended(self, error: str, receiver: str) -> None:
        if error:
            self._on_error(error, receiver)
            return
        with self._lock:
            self._left -= 1
        self._next()
        self._notify()
