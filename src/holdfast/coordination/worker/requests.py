"""Requests of one worker's script to all workers, such as to save or to stop after a step."""

from __future__ import annotations

from collections.abc import Collection

from holdfast.protocol.commit import Commit, Wish


def is_save_due(wishes: Collection[Wish], *, due: bool) -> bool:
    """Return whether all workers save after a step with these wishes in its result: always if a script requests it;
    else if a checkpoint is due or one asks to save if free, and none is still saving.

    The answer is the same on every worker, so a checkpoint either has the parts of all workers or is not written.

    Args:
        due: Whether a checkpoint is due by the number of the step.
    """
    if Wish.SAVE in wishes:
        return True
    return (due or Wish.SAVE_IF_FREE in wishes) and Wish.STILL_SAVING not in wishes


class Wishes:
    """The wishes that this worker raises, each until a step has passed with it."""

    def __init__(self) -> None:
        """Start without wishes."""
        #: why the script wants to stop, in its own words
        self.why = ""
        self._raised: set[Wish] = set()

    @property
    def raised(self) -> tuple[Wish, ...]:
        """The wishes for the next commit operation, in the order of the wire."""
        return tuple(wish for wish in Wish if wish in self._raised)

    def raise_wish(self, wish: Wish, why: str = "") -> None:
        """Raise a wish. The first non-empty `why` is reported with the end of the job."""
        self._raised.add(wish)
        self.why = self.why or why

    def drop_granted(self, commit: Commit, *, unsaved: bool) -> None:
        """Drop the wishes that a step result contains: all workers fulfil them.

        Args:
            unsaved: Whether no save was possible after this step. A requested save is then raised again.
        """
        self._raised.difference_update(commit.wishes)
        if unsaved and Wish.SAVE in commit.wishes:
            self._raised.add(Wish.SAVE)
