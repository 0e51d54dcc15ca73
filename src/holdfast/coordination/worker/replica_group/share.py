"""The micro-batches of one worker, and how the local ranks of a replica group agree on each (docs/layouts.md, rule 4).

All local ranks of a replica group compute a micro-batch together. One alone would wait in a forward pass forever. So a
local rank that has crossed `begin_micro_batch(m)` only proposes m to its group, and goes on once all have.

**Either all local ranks compute m or none does.** Proposals lie in a page that all local ranks share. The last one of
the same (generation, step, m) releases all of them, in one atomic change. A local rank that withdraws before that
releases none. Nothing else decides it: neither a Stop, nor any message that a local rank has received meanwhile.

**After a Begin, all local ranks have the same `summed`.** From the crossing on, the report names m. Crossing is refused
from Stop to Begin, and the coordinator decides once all local ranks have reported. So there are two cases:

- All reports name m. Then all have crossed, in the same generation and step. If Begin keeps m, none withdraws it
  (`is_proposal_wanted` stays True), so all propose it, and it is computed: `summed` is right everywhere.
- One report does not name m. That local rank has not crossed m, and will not before this Begin. Afterwards it is in
  another generation, in which it proposes another micro-batch. So the old proposal never succeeds: Begin does not keep
  m, and a local rank that waits for it withdraws.

If all have named m and Begin does not keep it (because another group has it, too, or the step is not repeated), all or
none may still compute it. Then Begin keeps nothing of that group. A worker that starts an attempt without summed
micro-batches discards its gradients. So `summed` is equal on all local ranks after a Begin, before any of them finishes
its current work.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.protocol.layouts.proposals import Proposal


@dataclass(slots=True)
class Share:
    """The micro-batches that one worker computes in the step in progress."""

    #: its micro-batches, if they differ from the default share of its group
    assigned: tuple[int, ...] | None = None
    #: the assigned micro-batches with local gradients, including the one in progress
    summed: list[int] = field(default_factory=list[int])
    #: the proposal on which its group has not agreed yet
    proposed: Proposal | None = None
    #: whether the proposal must be withdrawn: a Begin does not keep it, or the generation is over
    unwanted: bool = False

    def assign(self, assigned: tuple[int, ...] | None, *, same_step: bool, keeps: bool = False) -> None:
        """Assign micro-batches (None: the default share). Drop the sums of gradients, unless `keeps`, or they belong to
        the same step and to the new share.

        Args:
            same_step: Whether the new share is of the step of the summed gradients.
            keeps: Whether the step of the summed gradients may still be repeated, while the new share is of a later
                step.
        """
        if not (keeps or (same_step and assigned and set(self.summed) <= set(assigned))):
            self.summed = []
        self.assigned = assigned

    def assign_in_group(self, assigned: tuple[int, ...] | None, kept: tuple[int, ...]) -> None:
        """Assign micro-batches to a local rank (None: the default share). `kept` lists the sums that all local ranks of
        its group keep; others are dropped.

        An open proposal that is not kept becomes unwanted.

        Raises:
            ValueError: A kept micro-batch is not summed here.
        """
        if lacking := sorted(set(kept) - set(self.summed)):
            raise ValueError(f"micro-batches {lacking} are kept that are not summed here")
        self.summed = [micro_batch for micro_batch in self.summed if micro_batch in kept]
        self.assigned = assigned
        if self.proposed is not None and self.proposed.number not in kept:
            self.unwanted = True

    def clear(self) -> None:
        """Forget the assigned and the summed micro-batches. An open proposal stays open, but becomes unwanted: it must
        be withdrawn.
        """
        self.assigned = None
        self.summed = []
        self.unwanted = self.proposed is not None

    def propose(self, proposal: Proposal) -> None:
        """Open a proposal to the replica group.

        Raises:
            ValueError: The previous proposal is still open.
        """
        if self.proposed is not None:
            raise ValueError(f"{self.proposed} is still open")
        self.proposed, self.unwanted = proposal, False

    def close_proposal(self, micro_batch: int, *, agreed: bool) -> None:
        """Close a proposal that the replica group has accepted, or that was withdrawn.

        A withdrawn one no longer counts as summed, unless a new share has already dropped it.

        Raises:
            ValueError: This micro-batch was not proposed.
        """
        if self.proposed is None or self.proposed.number != micro_batch:
            raise ValueError(f"micro-batch {micro_batch} is not the one that is proposed: {self.proposed}")
        if not agreed and micro_batch in self.summed and not self.unwanted:
            self.summed.remove(micro_batch)  # The job is over.
        self.proposed, self.unwanted = None, False
