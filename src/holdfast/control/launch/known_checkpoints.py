"""Which checkpoints of an earlier run a job can resume from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from holdfast.protocol import checkpoint_dir
from holdfast.protocol.record import KnownCheckpoint


def intact_checkpoints(directory: Path | None, say: Callable[[str], None]) -> tuple[KnownCheckpoint, ...]:
    """Return the intact checkpoints of a directory, oldest first; each that is not is said, with the reason.

    Args:
        directory: None, or one that need not exist, holds none.
    """
    if directory is None or not directory.is_dir():
        return ()
    intact = checkpoint_dir.intact_checkpoints(
        directory, lambda error: say(f"holdfast: a checkpoint is damaged and not used: {error}")
    )
    return tuple(
        KnownCheckpoint(step=name.step, name=name.final, term=name.term, generation=name.generation) for name in intact
    )
