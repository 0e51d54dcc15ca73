"""A loop over the steps that its script has left (`break`): what it has led to is saved once the script has ended.

Not at once: a generator that is closed cannot tell `break` from an exception that passes through the loop.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable

from holdfast.errors import BadInputError
from holdfast.runtime.state.state import TrainingState

logger = logging.getLogger(__name__)

#: of each parameter and buffer: where it lies, and how often it was written to
_Seen = list[tuple[int, int]]


class LeftLoop:
    """What the state was when the loop was left."""

    def __init__(self, state: TrainingState, unsaved: Callable[[], bool], save: Callable[[], object]) -> None:
        """Nobody has left it yet.

        Args:
            unsaved: tells whether the state is one that is to be saved here, and is not yet. save: saves it.
        """
        self._state = state
        self._unsaved = unsaved
        self._save = save
        self._seen: _Seen | None = None

    def note(self) -> None:
        """The loop is left, by whatever."""
        self._seen = self._look()

    def save(self) -> None:
        """The script has ended, and well: save what the loop has led to, if it was left, and unless it is saved."""
        if self._seen is None or not self._unsaved():
            return
        if self._unchanged():
            self._save()
        else:
            logger.warning(
                "the state was changed after the loop was left, so it is not saved; job.stop(reason) in place of "
                "`break` saves it"
            )

    def _unchanged(self) -> bool:
        try:
            self._state.watch.check()
        except BadInputError:
            return False
        return self._seen == self._look()

    def _look(self) -> _Seen:
        model = self._state.model
        return [(tensor.data_ptr(), tensor._version) for tensor in itertools.chain(model.parameters(), model.buffers())]
