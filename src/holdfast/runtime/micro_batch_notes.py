"""Notes: information about a micro-batch that reaches every rank before the step can pass.

Each rank computes its own micro-batches, but some results concern the whole job: running statistics, values that the
script logged, the position of a data stream. The rank that computes a micro-batch keeps its note with the gradient, and
repeats both together. All notes are gathered with the reduction, so every rank that is READY has the notes of all M
micro-batches and can apply the step. The merged result is a function of the state and of the notes in the order of the
micro-batches. It is the same in every bit, whatever the number of workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from holdfast.runtime.dtensor.replica_position import WHOLE_REPLICA, ReplicaPosition
from holdfast.runtime.groups.communicator import Communicator
from holdfast.runtime.groups.gathering import gather_bytes

#: the notes of one micro-batch, one from each source; b"" if a source has nothing to say
Note = tuple[bytes, ...]


class NoteSource:
    """Makes a note of each micro-batch. Subclasses override the hooks that they need.

    All hooks are called in the training thread. In an attempt at a step: `on_attempt_start`; for each micro-batch
    computed here `on_micro_batch_start`, `on_forward_done`, `make_note`; then `make_rank_note`; `merge`, once all notes
    arrived; and `apply`, once the step passed, perhaps under a later generation. An attempt may be interrupted
    anywhere.
    """

    #: whether `merge` gets the notes of all parts of a micro-batch, in the order of samples, if ranks of a replica
    #: group split its samples; else it gets the note of the first part
    of_parts = True

    def on_attempt_start(self) -> None:
        """Discard unfinished results of the previous attempt."""

    def on_micro_batch_start(self, step: int, micro_batch: int) -> None:
        """Called before a micro-batch is fetched and computed."""

    def on_forward_done(self) -> None:
        """Called after the forward pass. The backward pass may repeat parts of the forward pass."""

    def make_note(self) -> bytes:
        """Return the note of the finished micro-batch, or b""."""
        return b""

    def make_rank_note(self) -> bytes:
        """Return this rank's note of the attempt, apart from its micro-batches, or b""."""
        return b""

    def merge(self, notes: Sequence[bytes], of_ranks: Sequence[bytes]) -> None:
        """Merge the notes of all ranks, and keep the result until `apply`.

        Args:
            notes: of all M micro-batches in their order, or of their parts.
            of_ranks: the `make_rank_note` of each rank.

        Raises:
            BadInputError: the notes contradict each other; raised on every rank.
        """

    def apply(self) -> None:
        """Put the last merged result in force, as the step has passed. Called on every rank."""


class _Share(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One rank's contribution: the notes of its micro-batches (or of its part of each), and its own note."""

    notes: dict[int, Note]
    own: Note
    part: int = 0


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Share)


class Notes:
    """All note sources of a job, and the exchange of their notes between ranks."""

    def __init__(
        self, sources: Sequence[NoteSource], micro_batches: int, place: ReplicaPosition = WHOLE_REPLICA
    ) -> None:
        """Gather the notes of these sources. All ranks must have the same sources in the same order.

        Args:
            micro_batches: M, the micro-batches of a step.
            place: which part of a replica is here. Of ranks with the same samples, only the first one contributes
                notes.
        """
        self._sources = tuple(sources)
        self._micro_batches = micro_batches
        self._place = place
        self._own: Note = ()

    def on_attempt_start(self) -> None:
        """Start an attempt at a step."""
        for source in self._sources:
            source.on_attempt_start()

    def on_micro_batch_start(self, step: int, micro_batch: int) -> None:
        """Called before a micro-batch is fetched."""
        for source in self._sources:
            source.on_micro_batch_start(step, micro_batch)

    def on_forward_done(self) -> None:
        """Called after the forward pass of the current micro-batch."""
        for source in self._sources:
            source.on_forward_done()

    def make_note(self) -> Note:
        """Return the notes of the finished micro-batch."""
        return tuple(source.make_note() for source in self._sources)

    def has_notes(self, held: Mapping[int, Note]) -> bool:
        """Make this rank's own notes, and return whether this rank has any note of the step. Called after its last
        micro-batch.

        Args:
            held: the notes of the micro-batches that were computed here.
        """
        self._own = tuple(source.make_rank_note() for source in self._sources)
        return any(map(any, (self._own, *held.values())))

    def gather(self, comm: Communicator, held: Mapping[int, Note]) -> bool:
        """Exchange the notes between all ranks, after `has_notes`, and let each source merge them. All ranks must call
        it.

        Returns:
            False, on every rank, if there is not exactly one note of each micro-batch: then the step must not pass.

        Raises:
            HaltedError, PeerLostError: abandoned or failed.
            BadInputError: raised by a source's `merge`.
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
        """Let each source merge empty notes, without an exchange: no rank has notes of the step."""
        self._merge([self._empty_note] * self._micro_batches * self._place.layout.shard, [self._empty_note])

    def apply(self) -> None:
        """Put the merged notes in force, as the step has passed."""
        for source in self._sources:
            source.apply()

    @property
    def _empty_note(self) -> Note:
        return (b"",) * len(self._sources)

    def _merge(self, notes: Sequence[Note], of_ranks: Sequence[Note]) -> None:
        """Let each source merge its own notes: of all micro-batches, and of all ranks. A source with `of_parts` gets
        the notes of all parts of a micro-batch, others only the first part's.

        Args:
            notes: one for each part of each micro-batch, in order.
            of_ranks: each rank's own note.

        Raises:
            BadInputError: by a source's `merge`.
        """
        for place, source in enumerate(self._sources):
            those = notes if source.of_parts else notes[:: self._place.layout.shard]
            source.merge([note[place] for note in those], [note[place] for note in of_ranks])
