"""What one worker asks all to do after a step: its script's wishes, until a step has passed with them."""

from __future__ import annotations

from collections.abc import Collection

from holdfast.protocol.commit import Commit, Wish


def is_save_due(wishes: Collection[Wish], *, due: bool) -> bool:
    """Return whether all workers save after a step with these wishes in its v.

    The answer is the same on every worker. So a checkpoint has the parts of all workers, or nobody writes one: a worker
    with slow storage makes saves less frequent, and never leaves a checkpoint without its part. A save that was
    requested does not wait.

    Args:
        due: whether the number of the step says that a checkpoint is due.
    """
    if Wish.SAVE in wishes:
        return True
    return (due or Wish.SAVE_IF_FREE in wishes) and Wish.STILL_SAVING not in wishes


class Wishes:
    """`raised`: those that this worker raises in its next commit operation."""

    def __init__(self) -> None:
        """Begin without any."""
        #: why the script wants to stop, in its own words
        self.why = ""
        self._raised: set[Wish] = set()

    @property
    def raised(self) -> tuple[Wish, ...]:
        """In the order of the wire."""
        return tuple(wish for wish in Wish if wish in self._raised)

    def want(self, wish: Wish, why: str = "") -> None:
        """Raise a wish; `why`: said with the end of the job, the first time."""
        self._raised.add(wish)
        self.why = self.why or why

    def passed(self, commit: Commit, *, unsaved: bool) -> None:
        """A step is applied with this v: what is raised there is done by all.

        Args:
            unsaved: nothing could be saved after this step; what is wanted of that, stays wanted.
        """
        self._raised.difference_update(commit.wishes)
        if unsaved and Wish.SAVE in commit.wishes:
            self._raised.add(Wish.SAVE)
