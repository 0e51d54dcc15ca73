"""Agreement of a replica group on the micro-batch to compute next. See `share` for why it is safe."""

from __future__ import annotations

from abc import ABC, abstractmethod

from holdfast.coordination.worker.boundaries import InvalidTransitionError
from holdfast.coordination.worker.replica_group.share import Share
from holdfast.protocol.layouts.proposals import Proposal
from holdfast.protocol.messages.orders import Begin


class GroupAgreement(ABC):
    """A worker's part in the agreement. After `begin_micro_batch(m)`, either the group accepts m or it is withdrawn.

    The shell writes `proposal` into the group's shared page and polls the page until all local ranks have proposed the
    same. Meanwhile it checks `is_proposal_wanted` after each order, and tries to withdraw once that is False.
    """

    def __init__(self) -> None:
        """Start without a share."""
        self._share = Share()
        self.done = False
        #: whether the script has ended and the state is kept only for others
        self._keeps_state_only = False

    @property
    def proposal(self) -> Proposal | None:
        """The open proposal to the group, or None. It stays the same until it is accepted or withdrawn."""
        return self._share.proposed

    def accept_proposal(self, micro_batch: int) -> None:
        """Record that all local ranks have proposed this micro-batch: all compute it, whatever happened meanwhile."""
        self._close_proposal(micro_batch, agreed=True)

    def is_proposal_wanted(self, micro_batch: int) -> bool:
        """Return whether to keep waiting for the group.

        False if this micro-batch is not proposed, a new share excludes it, or the job is done; it then stays False:
        withdraw unless the group has agreed.
        """
        proposed = self._share.proposed
        there = proposed is not None and proposed.number == micro_batch
        return there and not (self._share.unwanted or self.done)

    def withdraw_proposal(self, micro_batch: int) -> None:
        """Record that the proposal was withdrawn before all had proposed it, so that no local rank computes it.

        Raises `InvalidTransitionError` while it is still wanted.
        """
        if self.is_proposal_wanted(micro_batch):
            raise self._transition_error(f"withdraw_proposal (micro-batch {micro_batch} is promised to the unit)")
        self._close_proposal(micro_batch, agreed=False)

    # ---- inside ----

    def _close_proposal(self, micro_batch: int, *, agreed: bool) -> None:
        """Close the proposal of a micro-batch. Raises `InvalidTransitionError` if it is not the open one."""
        try:
            self._share.close_proposal(micro_batch, agreed=agreed)
        except ValueError as error:
            raise self._transition_error(f"{'accept_proposal' if agreed else 'withdraw_proposal'} ({error})") from error

    def _propose(self, proposal: Proposal) -> None:
        """Record the open proposal to the replica group; the shell reads it in `proposal` and gives it to the group.

        Raises:
            InvalidTransitionError: another proposal is open.
        """
        try:
            self._share.propose(proposal)
        except ValueError as error:
            raise self._transition_error(f"begin_micro_batch ({error})") from error

    def _assign_share(self, order: Begin, unit: int, *, same_step: bool, keeps: bool) -> None:
        """Assign the micro-batches that a Begin gives to replica group `unit`, and drop gradients that do not belong to
        them.

        `same_step`, `keeps`: see `Share.assign`; a group of several local ranks keeps what the order names. Raises
        `InvalidTransitionError` if a kept micro-batch is not summed here.
        """
        share = order.assignment[unit] if order.assignment else None
        if order.plan.places == 1:
            self._share.assign(share, same_step=same_step, keeps=keeps)
            return
        try:
            self._share.assign_in_group(share, order.kept[unit] if order.kept and not self._keeps_state_only else ())
        except ValueError as error:
            raise self._transition_error(f"begin ({error})") from error

    @abstractmethod
    def _transition_error(self, name: str) -> InvalidTransitionError:
        """Return the exception for a boundary that is not allowed."""
