"""Micro-batches that the script skips (`step.skip`): decisions are gathered from all ranks and kept.

If a step is repeated, its decisions are repeated, and the script is not asked again.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.protocol.commit import MAX_REASON, MAX_REASONS, MicroBatchSkip
from holdfast.runtime.micro_batch_notes import NoteSource

#: number of kept decisions; older ones are dropped
MAX_DECISIONS = 4096


class SkippedMicroBatches(NoteSource):
    """The decisions of this worker's script, and all ranks' decisions after their notes have arrived."""

    of_parts = False

    def __init__(self) -> None:
        """Start without decisions."""
        #: the skipped micro-batches of the last gathered step
        self.skips: tuple[MicroBatchSkip, ...] = ()
        self._decisions: dict[tuple[int, int], str] = {}
        self._step = 0
        self._reason = ""
        self._micro_batch = 0

    def find_decision(self, step: int, micro_batch: int) -> str:
        """Return why a micro-batch was skipped in an earlier attempt, or "" if it was not."""
        return self._decisions.get((step, micro_batch), "")

    def skip(self, reason: str) -> None:
        """Record the decision to skip the micro-batch in progress. The reason, cut to `MAX_REASON` characters, becomes
        its note.
        """
        self._reason = reason[:MAX_REASON]
        self._record_decision(self._micro_batch, self._reason)

    def on_micro_batch_start(self, step: int, micro_batch: int) -> None:
        """Remember which micro-batch is in progress, not skipped so far."""
        self._step = step
        self._micro_batch = micro_batch
        self._reason = ""

    def make_note(self) -> bytes:
        note, self._reason = self._reason.encode(), ""
        return note

    def merge(self, notes: Sequence[bytes], of_ranks: Sequence[bytes]) -> None:
        """Record all ranks' decisions for a repetition of the step, and list them in `skips`, as far as their reasons
        fit into `MAX_REASONS` bytes.
        """
        reasons = {number: note.decode() for number, note in enumerate(notes) if note}
        listed: list[MicroBatchSkip] = []
        room = MAX_REASONS
        for micro_batch, reason in reasons.items():
            self._record_decision(micro_batch, reason)
            room -= len(reason.encode()) + 16
            if room >= 0:
                listed.append(MicroBatchSkip(micro_batch=micro_batch, reason=reason))
        self.skips = tuple(listed)

    def _record_decision(self, micro_batch: int, reason: str) -> None:
        """Keep a decision of the step in progress; the oldest ones are dropped beyond `MAX_DECISIONS`."""
        self._decisions[self._step, micro_batch] = reason
        while len(self._decisions) > MAX_DECISIONS:
            del self._decisions[next(iter(self._decisions))]
