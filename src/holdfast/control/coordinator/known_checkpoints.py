"""The checkpoints of an earlier run with which a coordinator starts."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.errors import BadInputError
from holdfast.protocol.checkpoints import directory as checkpoint_dir
from holdfast.protocol.record import KnownCheckpoint
from holdfast.storage import error_text, storage_at


def load_usable_checkpoints(directory: str, say: Callable[[str], None]) -> tuple[KnownCheckpoint, ...]:
    """Return the intact checkpoints of a directory, oldest first, without steps that the job has rolled back.

    Args:
        directory: a path or a URL. "", and a directory that does not exist, contain none.
        say: called with a line about each damaged checkpoint.

    Raises:
        BadInputError: it is a URL that cannot be used, or it cannot be read.
    """
    if not directory:
        return ()
    try:
        intact = checkpoint_dir.find_usable_checkpoints(
            storage_at(directory), lambda error: say(f"holdfast: a checkpoint is damaged and not used: {error}")
        )
    except OSError as error:
        raise BadInputError(f"the checkpoint directory {directory} cannot be read: {error_text(error)}") from None
    return tuple(
        KnownCheckpoint(step=name.step, name=name.folder, term=name.term, generation=name.generation) for name in intact
    )
