"""What a worker says of collectives that failed, and what it looks for before it does."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.coordination.worker.generations import KnownGenerations
from holdfast.protocol.messages.worker import Complaint


class Complaints:
    """One worker's; `looking` while it is being found out who cannot be reached."""

    def __init__(self, worker: str, generations: KnownGenerations) -> None:
        """Have none. `worker`: whose they are, by its id."""
        self._worker = worker
        self._generations = generations
        #: the generations in which something was waited for in vain
        self._looking: set[int] = set()

    @property
    def looking(self) -> bool:
        """True while there is something to be told yet of what was seen."""
        return bool(self._looking)

    def forget(self) -> None:
        """Another generation is entered: what was seen before explains nothing."""
        self._looking.clear()

    def look(self, generation: int) -> bool:
        """Something of `generation` has taken too long: True where it is of use to look who cannot be reached."""
        if not self._generations.concerns(generation):
            return False
        self._looking.add(generation)
        return True

    def make(
        self,
        generation: int,
        detail: str,
        *,
        timed_out: bool,
        unreachable: Sequence[str],
        transfer_peers: Sequence[str] = (),
    ) -> tuple[Complaint | None, bool]:
        """Return what to tell of a failure in `generation`, None where it is no news; and whether it was looked for."""
        looked = generation in self._looking
        self._looking.discard(generation)
        if not looked and not self._generations.concerns(generation):
            return None, False
        complaint = Complaint(
            worker=self._worker,
            generation=generation,
            detail=detail[:1024],
            timed_out=timed_out,
            unreachable=tuple(unreachable),
            transfer_peers=tuple(transfer_peers),
        )
        return complaint, looked
