"""What the parts of a simulated worker process ask of it: the process itself is above them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from holdfast.coordination.worker.tasks import WorkerInstruction
from holdfast.protocol.messages.worker import WorkerMessage
from holdfast.simulation.invariants import Checker
from holdfast.simulation.world import Peer, World


class WorkerHost(Peer, Protocol):
    """A worker process, for what it consists of."""

    node: str
    world: World
    checker: Checker
    #: the training thread hangs
    hung: bool

    @property
    def busy(self) -> str: ...

    @busy.setter
    def busy(self, what: str) -> None: ...

    def deliver(self, action: Callable[..., object], *args: Any) -> None: ...

    def tell(self, message: WorkerMessage) -> None: ...

    def obey(self, instructions: Iterable[WorkerInstruction]) -> None: ...

    def issue(
        self, kind: str, payload: Any, combine: Callable[[Iterable[Any]], Any], *, step: int | None = None
    ) -> None: ...

    def raised(self) -> None: ...

    def saved(self) -> None: ...
