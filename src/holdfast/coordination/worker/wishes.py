"""What one worker asks all to do after a step: its script's wishes, until a step has passed with them."""

from __future__ import annotations

from holdfast.protocol.commit import Commit, Wish


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
