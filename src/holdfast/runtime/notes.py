"""Notes: what a micro-batch leaves beside its gradient, brought to every rank before the step can pass.

Each rank computes its own micro-batches, but some of what they make concerns the whole job: what became of running
statistics, values that the script has logged, where a stream of data stands. Whoever computes a micro-batch keeps its
note beside the gradient (held and redone with it). With the reduction all notes are gathered, so that every rank which
is READY has those of all M micro-batches, and can apply. What is made of them is a function of the state and the notes
in the order of the micro-batches alone: the same in every bit, whatever the world, and whoever computed what.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from holdfast.runtime.dtensor.place import WHOLE_REPLICA, ReplicaPosition
from holdfast.runtime.groups.communicator import Communicator
from holdfast.runtime.groups.gathering import gather_bytes

#: of one micro-batch, from each source of notes; b"" says nothing
Note = tuple[bytes, ...]


class NoteSource:
    """Something that leaves a note of each micro-batch; what it does not need of this stays as it is here.

    All is called in the training thread. In an attempt at a step: `restart`; of each micro-batch that is computed here
    `begin`, `computed`, `note`; then `rank_note`; `take`, once all ranks' notes are here; and, once the step has
    passed, perhaps under a later generation, `apply`. An attempt may be left anywhere, and another begin.
    """

    #: where the places of a unit share out the samples of a micro-batch (layouts): `take` is given what each of them
    #: has noted, in the samples' order, and not what the first one has
    of_parts = True

    def on_attempt_start(self) -> None:
        """An attempt begins: what was not finished of the one before is of no use."""

    def on_micro_batch_start(self, step: int, micro_batch: int) -> None:
        """A micro-batch is about to be fetched and computed."""

    def on_forward_done(self) -> None:
        """Its forward pass is over; backward, which may run parts of the forward pass again, is not begun."""

    def make_note(self) -> bytes:
        """It is over, whatever the script did with it: return what it leaves, b"" for nothing."""
        return b""

    def make_rank_note(self) -> bytes:
        """Return what this rank leaves of the attempt beside its micro-batches, b"" for nothing."""
        return b""

    def merge(self, notes: Sequence[bytes], of_ranks: Sequence[bytes]) -> None:
        """All ranks' notes are here: keep what is made of them until `apply`; nothing is in force yet.

        Args:
            notes: of all M micro-batches, in their order, or of their parts. of_ranks: `rank_note` of each rank.

        Raises:
            BadInputError: they do not fit together; the same on every rank.
        """

    def apply(self) -> None:
        """The step has passed: put in force what was made of the notes taken last. Called in apply, on every rank."""


class _Share(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What one rank puts in: the notes of its micro-batches, or of the part of each that it has, and its own."""

    notes: dict[int, Note]
    own: Note
    part: int = 0


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Share)


class Notes:
    """All sources of notes of a job, and the way of their notes to all ranks."""

    def __init__(
        self, sources: Sequence[NoteSource], micro_batches: int, place: ReplicaPosition = WHOLE_REPLICA
    ) -> None:
        """Gather the notes of these sources, the same in number and order on all ranks, of M micro-batches a step.

        Args:
            place: which part of a replica is here: of places that have the same samples only the first says anything.
        """
        self._sources = tuple(sources)
        self._micro_batches = micro_batches
        self._place = place
        self._own: Note = ()

    def on_attempt_start(self) -> None:
        """An attempt at a step begins."""
        for source in self._sources:
            source.on_attempt_start()

    def on_micro_batch_start(self, step: int, micro_batch: int) -> None:
        """A micro-batch is about to be fetched."""
        for source in self._sources:
            source.on_micro_batch_start(step, micro_batch)

    def on_forward_done(self) -> None:
        """The forward pass of the micro-batch at hand is over."""
        for source in self._sources:
            source.on_forward_done()

    def make_note(self) -> Note:
        """Return what the micro-batch at hand, which is over, leaves."""
        return tuple(source.make_note() for source in self._sources)

    def has_notes(self, held: Mapping[int, Note]) -> bool:
        """Tell whether this rank has anything to say of a step, now that all its micro-batches are over.

        Args:
            held: the notes of the micro-batches that were computed here.
        """
        self._own = tuple(source.make_rank_note() for source in self._sources)
        return any(map(any, (self._own, *held.values())))

    def gather(self, comm: Communicator, held: Mapping[int, Note]) -> bool:
        """Bring the notes of all ranks to all ranks, after `any` of the same. All ranks must call it.

        Returns:
            False, on every rank, where they are not one of each micro-batch: the step must not pass.

        Raises:
            HaltedError, PeerLostError: abandoned or failed.
            BadInputError: what a source says of the notes.
        """
        silent, shard = self._place.tensor > 0, self._place.layout.shard
        mine = _Share({}, self._empty_note) if silent else _Share(dict(held), self._own, self._place.shard)
        shares = [_decoder.decode(share) for share in gather_bytes(comm, _encoder.encode(mine), "notes")]
        notes = {(number, share.part): note for share in shares for number, note in share.notes.items()}
        there = sum(len(share.notes) for share in shares)
        wanted = [(number, part) for number in range(self._micro_batches) for part in range(shard)]
        if sorted(notes) != wanted or there != len(wanted):
            return False
        self._merge([notes[one] for one in wanted], [share.own for share in shares])
        return True

    def merge_none(self) -> None:
        """No rank has anything to say of the step."""
        self._merge([self._empty_note] * self._micro_batches * self._place.layout.shard, [self._empty_note])

    def apply(self) -> None:
        """The step has passed: put in force what was made of its notes."""
        for source in self._sources:
            source.apply()

    @property
    def _empty_note(self) -> Note:
        return (b"",) * len(self._sources)

    def _merge(self, notes: Sequence[Note], of_ranks: Sequence[Note]) -> None:
        for place, source in enumerate(self._sources):
            those = notes if source.of_parts else notes[:: self._place.layout.shard]
            source.merge([note[place] for note in those], [note[place] for note in of_ranks])
