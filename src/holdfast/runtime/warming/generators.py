"""Saves and restores the global random generators of torch, Python and numpy."""

from __future__ import annotations

import random
from contextlib import ExitStack
from typing import Any

import numpy as np

from holdfast.runtime.tensors import fork_rng


class SavedGenerators:
    """Saves their states until `restore`, so that shadow steps do not change the script's later draws."""

    def __init__(self) -> None:
        self._kept = ExitStack()

    def save(self) -> None:
        """Save the current states."""
        untyped: Any = np.random
        self._kept.enter_context(fork_rng())
        self._kept.callback(random.setstate, random.getstate())
        self._kept.callback(untyped.set_state, untyped.get_state())

    def restore(self) -> None:
        """Restore the saved states."""
        self._kept.close()
