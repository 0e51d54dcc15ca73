"""Which checkpoints of an earlier run a job can resume from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from holdfast.checkpoint_dir import DamagedCheckpointError, find_checkpoints, verify
from holdfast.protocol.record import KnownCheckpoint


def intact_checkpoints(directory: Path | None, say: Callable[[str], None]) -> tuple[KnownCheckpoint, ...]:
    """Return the intact checkpoints of a directory, oldest first; each that is not is said, with the reason.

    Args:
        directory: None, or one that need not exist, holds none.
    """
    if directory is None or not directory.is_dir():
        return ()
    intact = []
    for found in find_checkpoints(directory):
        try:
            verify(directory / found.name)
        except DamagedCheckpointError as error:
            say(f"holdfast: a checkpoint is damaged and not used: {error}")
            continue
        intact.append(KnownCheckpoint(step=found.step, name=found.name))
    return tuple(intact)
