"""A loop over the steps that its script has left (`break`): what it has led to is saved once the script has ended.

Not at once: a generator that is closed cannot tell `break` from an exception that passes through the loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from holdfast.errors import BadInputError
from holdfast.runtime.state.state import TrainingState

#: of each parameter and buffer: where it lies, and how often it was written to
_Seen = list[tuple[int, int]]


class LeftLoop:
    """What the state was when the loop was left."""

    def __init__(self, state: TrainingState, save: Callable[[bool], None]) -> None:
        """Nobody has left it yet. `save`: saves the state, if that is still as it was left."""
        self._state = state
        self._save = save
        self._seen: _Seen | None = None

    def note(self) -> None:
        """The loop is left, by whatever."""
        self._seen = self._look()

    def save(self) -> None:
        """The script has ended, and well: save what the loop has led to, if it was left, and unless it is saved."""
        if self._seen is not None:
            self._save(self._unchanged())

    def _unchanged(self) -> bool:
        try:
            self._state.watch.check()
        except BadInputError:
            return False
        return self._seen == self._look()

    def _look(self) -> _Seen:
        model = self._state.model
        return [(tensor.data_ptr(), tensor._version) for tensor in itertools.chain(model.parameters(), model.buffers())]
