"""Which checkpoints of an earlier run a coordinator begins with."""

from __future__ import annotations

import os.path
from collections.abc import Callable
from pathlib import Path

from holdfast.protocol import checkpoint_dir
from holdfast.protocol.record import KnownCheckpoint


def intact_checkpoints(directory: str, say: Callable[[str], None]) -> tuple[KnownCheckpoint, ...]:
    """Return the intact checkpoints of a directory, oldest first; each that is not is said, with the reason.

    Args:
        directory: "", or one that need not exist, holds none.
    """
    if not directory or not os.path.isdir(directory):
        return ()
    intact = checkpoint_dir.intact_checkpoints(
        Path(directory), lambda error: say(f"holdfast: a checkpoint is damaged and not used: {error}")
    )
    return tuple(
        KnownCheckpoint(step=name.step, name=name.final, term=name.term, generation=name.generation) for name in intact
    )
