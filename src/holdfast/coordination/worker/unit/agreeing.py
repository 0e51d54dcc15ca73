"""What the shell asks a worker's machine of the micro-batch that its unit is to agree on; why it is safe: `share`."""

from __future__ import annotations

from abc import ABC, abstractmethod

from holdfast.coordination.worker.boundaries import InvalidTransitionError
from holdfast.coordination.worker.unit.share import Share
from holdfast.protocol.layouts.proposals import Proposal
from holdfast.protocol.messages.orders import Begin


class Agreeing(ABC):
    """A worker as a place of its unit. After `computing(m)` either `agreed(m)` or `withdrawn(m)` follows.

    The shell puts `proposal` into the unit's page, and looks there until all places have proposed the same. As long as
    they have not it asks `still_wanted` after each order; where that says no, it tries to withdraw.
    """

    def __init__(self) -> None:
        """Have no share of anything."""
        self._share = Share()
        self.done = False
        self._kept = False  # for others: the script has ended

    @property
    def proposal(self) -> Proposal | None:
        """What is to be proposed to the unit, or lies there; None: nothing is open. It stays the same until settled."""
        return self._share.proposed

    def agreed(self, micro_batch: int) -> None:
        """All places of the unit have proposed this: all compute it, whatever happened meanwhile."""
        self._settle(micro_batch, agreed=True)

    def still_wanted(self, micro_batch: int) -> bool:
        """Tell whether to wait on for the unit to agree; False, and ever after: withdraw it, unless it has agreed."""
        proposed = self._share.proposed
        there = proposed is not None and proposed.number == micro_batch
        return there and not (self._share.unwanted or self.done)

    def withdrawn(self, micro_batch: int) -> None:
        """It was withdrawn from the unit's page before all had proposed it: none of them computes it."""
        if self.still_wanted(micro_batch):
            raise self._invalid(f"withdrawn (micro-batch {micro_batch} is promised to the unit)")
        self._settle(micro_batch, agreed=False)

    # ---- inside ----

    def _settle(self, micro_batch: int, *, agreed: bool) -> None:
        try:
            self._share.settle(micro_batch, agreed=agreed)
        except ValueError as error:
            raise self._invalid(f"{'agreed' if agreed else 'withdrawn'} ({error})") from error

    def _propose(self, proposal: Proposal) -> None:
        try:
            self._share.propose(proposal)
        except ValueError as error:
            raise self._invalid(f"computing ({error})") from error

    def _take_up(self, order: Begin, unit: int, *, same_step: bool, keeps: bool) -> None:
        """Have the share that a Begin gives; the arguments as of `Share.change`."""
        share = order.assignment[unit] if order.assignment else None
        if order.plan.places == 1:
            self._share.change(share, same_step=same_step, keeps=keeps)
            return
        try:
            self._share.take_up(share, order.kept[unit] if order.kept and not self._kept else ())
        except ValueError as error:
            raise self._invalid(f"begin ({error})") from error

    @abstractmethod
    def _invalid(self, name: str) -> InvalidTransitionError:
        """Return what to raise where a boundary is not allowed."""
