"""A loop over the steps that its script has left (`break`): what it has led to is saved once the script has ended.

Not at once: a generator that is closed cannot tell `break` from an exception that passes through the loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from holdfast.errors import BadInputError
from holdfast.runtime.state.state import TrainingState

#: of each parameter and buffer: where it lies, and how often it was written to
_Stamps = list[tuple[int, int]]


class LeftLoopSaver:
    """What the state was when the loop was left."""

    def __init__(self, state: TrainingState, save: Callable[[bool], None]) -> None:
        """Nobody has left it yet. `save`: saves the state, if that is still as it was left."""
        self._state = state
        self._save = save
        self._stamps: _Stamps | None = None

    def record(self) -> None:
        """The loop is left, by whatever."""
        self._stamps = self._stamp()

    def save(self) -> None:
        """The script has ended, and well: save what the loop has led to, if it was left, and unless it is saved."""
        if self._stamps is not None:
            self._save(self._is_unchanged())

    def _is_unchanged(self) -> bool:
        try:
            self._state.watch.check_unchanged()
        except BadInputError:
            return False
        return self._stamps == self._stamp()

    def _stamp(self) -> _Stamps:
        model = self._state.model
        return [(tensor.data_ptr(), tensor._version) for tensor in itertools.chain(model.parameters(), model.buffers())]
