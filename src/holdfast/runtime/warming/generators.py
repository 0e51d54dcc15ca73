"""The global generators of torch, Python and numpy, as they were."""

from __future__ import annotations

import random
from contextlib import ExitStack
from typing import Any

import numpy as np

from holdfast.runtime.tensors import fork_rng


class SavedGenerators:
    """Keeps their states until `restore`: what a script draws between its real steps is what it would have drawn."""

    def __init__(self) -> None:
        self._kept = ExitStack()

    def save(self) -> None:
        """Keep them as they are now."""
        untyped: Any = np.random
        self._kept.enter_context(fork_rng())
        self._kept.callback(random.setstate, random.getstate())
        self._kept.callback(untyped.set_state, untyped.get_state())

    def restore(self) -> None:
        """Give back what was kept."""
        self._kept.close()
