"""How a worker takes a state that it is sent, alone or with its unit (docs/layouts.md, rules 6 and 9).

**The places of a unit give up what they keep all together.** A step that one unit alone has finished goes from each of
its places to one place of every other unit. Would each take what comes as soon as it has come, and the sender be lost
before all have it, then some places had the newer step and others the older one, and nobody either as a whole. So a
place that keeps its own crosses `adopting` once the newer state has come whole, from where on it reports nothing, and
proposes to take it to its unit, as it does a micro-batch: the last proposal makes all go, in one atomic change. Stop
makes it withdraw instead, if the page lets it, and report what it has kept. All take it, or none does.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from holdfast.coordination.worker.comparing import ReplicaComparison
from holdfast.coordination.worker.copy import StateCopy
from holdfast.coordination.worker.generations import KnownGenerations
from holdfast.coordination.worker.tasks import WorkerInstruction
from holdfast.coordination.worker.unit.agreeing import Agreeing
from holdfast.protocol.plan import Passed


class Adopting(Agreeing):
    """What the shell asks a worker's machine of the state that peers send."""

    def __init__(self, worker: str) -> None:
        """Be in no generation, with a fresh state."""
        super().__init__()
        self.generations = KnownGenerations(worker)
        self._copy = StateCopy()
        self._comparison = ReplicaComparison()

    def pushed(self, generation: int) -> bool:
        """A peer offers the state of `generation`: True if this worker takes it (and, if pending, has entered it).

        Where it `keeps` its own, what comes must be put beside that.
        """
        if self.generations.frozen or not self._copy.lacking:
            return False
        pending = self.generations.pending_of(generation)
        if pending is not None and self.generations.plan is None:
            self._swap()
        if not self._enters(generation):
            return False
        if not self._copy.keeps:
            self._copy.spoil()
        return True

    def adopting(self, generation: int) -> bool:
        """A state has come whole, and is about to take the place of what is here. False: it came too late.

        Where the unit receives as a whole (`Receive.together`) a place that `keeps` its own proposes it to the unit
        (`adoption`), and goes on once all have; `unadopted` follows where it is withdrawn. Another place proposes it
        after `received`: what it had is void as it is.
        """
        if not self._enters(generation):
            return False
        self._follow("adopting")
        return True

    def still_adopts(self, generation: int) -> bool:
        """Tell whether to wait on for all places to have what they are sent; False, and ever after: withdraw it."""
        return not (self.done or self.generations.frozen) and self.generations.number == generation

    def unadopted(self) -> list[WorkerInstruction]:
        """Not all places of the unit have got what they are sent: each keeps what it had."""
        self._follow("unadopted")
        return self._report()

    def received(self, passed: Sequence[Passed], step: int) -> list[WorkerInstruction]:
        """The state of `step` is the one that is here, and the newest steps that have led to it are known.

        That v is not only known where it was applied: whoever has the state can tell of it.
        """
        self._follow("received")
        self._share.summed = []
        self._copy.spoil()
        self._copy.hold(step, passed)
        self._copy.sent = tuple(passed)
        self._comparison.receive(step)
        return self._report()

    def spoilt(self) -> list[WorkerInstruction]:
        """What had come cannot take the place of what was here, and that is void."""
        self._follow("spoilt")
        self._copy.spoil()
        return self._report()

    # ---- inside ----

    @abstractmethod
    def _enters(self, generation: int) -> bool:
        """True while this worker is about to enter this generation."""

    @abstractmethod
    def _swap(self) -> None:
        """The pending generation is the current one from here on."""

    @abstractmethod
    def _follow(self, boundary: str) -> None:
        """Be where the table says that this boundary leads."""

    @abstractmethod
    def _report(self) -> list[WorkerInstruction]:
        """Answer the Stop, where there is one and nothing is under way."""
