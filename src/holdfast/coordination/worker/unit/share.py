"""What one worker computes of the step in progress, and how the places of a unit agree on it (docs/layouts.md, rule 4).

A micro-batch of a unit is computed by all of its places together: by one alone it cannot be, it would wait in a forward
pass for ever. So a place that has crossed `computing(m)` only proposes m to its unit, and goes on once all have.

**One computes it exactly if all do.** Proposals lie in a page that all places share; the last one of the same
(generation, step, m) makes all of them go, in one atomic change, and a place that withdraws its own before that keeps
all of them from going. Nothing else decides it: neither a Stop, nor what any place has heard meanwhile.

**What a Begin keeps, all have; what it does not keep, none counts.** From crossing on the report names m. Crossing is
refused from Stop to Begin, and the coordinator decides once all places have reported. So there are two cases:

- All reports name m. Then all have crossed, in the same generation and step. Where Begin keeps m, none withdraws it
  (`still_wanted` stays true, whatever comes), so all propose it, and it is computed: `summed` is right everywhere.
- One does not. That place has not crossed m, and will not before this Begin; afterwards it is of another generation, in
  which it proposes something else. So the old proposal never comes to anything: Begin does not keep m, and a place that
  waits for it withdraws.

Where all have named m and Begin does not keep it (another unit has it, too; the step is not done again), it is open
whether it is still computed, by all or none. `summed` is what Begin says either way, which is nothing at all of that
unit then: whoever begins an attempt with nothing summed lets go of what it had added up. So after a Begin the places
of a unit have the same `summed`, before any of them has come to an end with what it was about.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.protocol.layouts.proposals import Proposal


@dataclass(slots=True)
class Share:
    """What one worker computes of the step in progress.

    assigned: its micro-batches, where they are not those of its unit's number.
    summed: those of them whose gradients it has, or is about to have.
    proposed: the one that its unit has not agreed on yet.
    unwanted: nothing is to come of that: a Begin does not keep it, or there is no generation any more.
    """

    assigned: tuple[int, ...] | None = None
    summed: list[int] = field(default_factory=list[int])
    proposed: Proposal | None = None
    unwanted: bool = False

    def change(self, assigned: tuple[int, ...] | None, *, same_step: bool, keeps: bool = False) -> None:
        """Be given others; what is summed stays where it is a part of these, and of the same step.

        Args:
            keeps: the step of what is summed may still be done again: those that are given are of a later one.
        """
        if not (keeps or (same_step and assigned and set(self.summed) <= set(assigned))):
            self.summed = []
        self.assigned = assigned

    def take_up(self, assigned: tuple[int, ...] | None, kept: tuple[int, ...]) -> None:
        """Be given others, as a place of a unit: `kept` says for all of its places what stays of what is summed.

        Raises:
            ValueError: something is to stay that is not here.
        """
        if lacking := sorted(set(kept) - set(self.summed)):
            raise ValueError(f"micro-batches {lacking} are kept that are not summed here")
        self.summed = [micro_batch for micro_batch in self.summed if micro_batch in kept]
        self.assigned = assigned
        if self.proposed is not None and self.proposed.number not in kept:
            self.unwanted = True

    def leave(self) -> None:
        """Have no share of anything; nothing is to come of what is proposed."""
        self.assigned, self.summed, self.unwanted = None, [], self.proposed is not None

    def propose(self, proposal: Proposal) -> None:
        """Have a micro-batch to propose to the unit.

        Raises:
            ValueError: the one before is still open.
        """
        if self.proposed is not None:
            raise ValueError(f"{self.proposed} is still open")
        self.proposed, self.unwanted = proposal, False

    def settle(self, micro_batch: int, *, agreed: bool) -> None:
        """The unit computes what was proposed, or that is withdrawn.

        Raises:
            ValueError: it was not proposed.
        """
        if self.proposed is None or self.proposed.number != micro_batch:
            raise ValueError(f"micro-batch {micro_batch} is not the one that is proposed: {self.proposed}")
        if not agreed and micro_batch in self.summed and not self.unwanted:
            self.summed.remove(micro_batch)  # (the job is over)
        self.proposed, self.unwanted = None, False
