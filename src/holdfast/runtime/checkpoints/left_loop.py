"""Saves the state of a loop over the steps that its script has left (`break`), once the script has ended.

It is not saved at once, because a closed generator cannot distinguish `break` from an exception in the loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from holdfast.errors import BadInputError
from holdfast.runtime.state.state import TrainingState

#: address and version counter of each parameter and buffer
_Stamps = list[tuple[int, int]]


class LeftLoopSaver:
    """Remembers the state in which the loop was left."""

    def __init__(self, state: TrainingState, save: Callable[[bool], None]) -> None:
        """Start in the loop.

        Args:
            save: saves the state; its argument is whether the state is still as it was when the loop was left.
        """
        self._state = state
        self._save = save
        self._stamps: _Stamps | None = None

    def record(self) -> None:
        """Record the state when the loop is left for any reason."""
        self._stamps = self._stamp()

    def save(self) -> None:
        """Save the state when the script ends without an error, if the loop was left."""
        if self._stamps is not None:
            self._save(self._is_unchanged())

    def _is_unchanged(self) -> bool:
        """Return whether the model's parameters and buffers, and the extra objects, are as they were when the loop was
        left.
        """
        try:
            self._state.watch.check_unchanged()
        except BadInputError:
            return False
        return self._stamps == self._stamp()

    def _stamp(self) -> _Stamps:
        """Return the address and the version counter of each parameter and buffer."""
        model = self._state.model
        return [(tensor.data_ptr(), tensor._version) for tensor in itertools.chain(model.parameters(), model.buffers())]
