"""The best states by an evaluation, kept even after newer checkpoints supersede them.

Each is a checkpoint in `best-NAME-STEP`, next to the others. Its files are hard links to the checkpoint of that step if
the file system supports them, so they need space only after that checkpoint is removed. `best-NAME-STEP.json` contains
the value by which it was chosen. No job resumes from them. The files are the only record of them, because they outlive
jobs.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

import msgspec

from holdfast.protocol.checkpoints.directory import (
    MANIFEST,
    DamagedCheckpointError,
    find_checkpoints,
    read_manifest,
)
from holdfast.protocol.names import MALFORMED
from holdfast.storage import Storage

logger = logging.getLogger(__name__)

#: number of rated states that may wait for their checkpoints
_AWAITED = 16
_MAX_RATING_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class BestChoice:
    """Which evaluated states the job keeps as its best, beside the regular checkpoints."""

    #: the value that is compared
    monitor: str
    #: whether the least or the greatest value is the best
    mode: Literal["min", "max"]
    #: number of kept states
    keep: int


class Rating(msgspec.Struct, frozen=True, kw_only=True):
    """The value that an evaluation found for the state of a step, a finite number."""

    evaluation: str
    step: int
    monitor: str
    value: float

    @property
    def name(self) -> str:
        """The name of the state's directory."""
        return f"best-{self.evaluation}-{self.step:08d}"


class BestStates:
    """The best states in one checkpoint directory; used by the saver's thread."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._awaited: dict[tuple[str, int], tuple[Rating, BestChoice]] = {}

    def add_rating(self, rating: Rating, choice: BestChoice) -> None:
        """Keep the checkpoint of an evaluated state if it is one of the best: at once if it is complete, else when it
        is. At most `_AWAITED` ratings wait; the oldest ones are dropped.
        """
        self._awaited[rating.evaluation, rating.step] = rating, choice
        while len(self._awaited) > _AWAITED:
            del self._awaited[next(iter(self._awaited))]
        self.keep_rated(rating.step)

    def on_complete(self, step: int) -> None:
        """Keep a complete checkpoint if its state was rated as one of the best. Ratings of older steps whose
        checkpoints are not complete are dropped with a warning.
        """
        self.keep_rated(step)
        for key in [key for key in self._awaited if key[1] < step]:
            self.keep_rated(key[1])
            if self._awaited.pop(key, None) is not None:
                logger.warning(
                    "the state of step %d, one of the best of %s, is not kept: the checkpoint of step %d was complete "
                    "before its own",
                    *(key[1], key[0], step),
                )

    def keep_rated(self, step: int) -> None:
        """If the checkpoint of a step is complete, keep it for each waiting rating of this step by which it is one of
        the best; these ratings no longer wait. Else they go on waiting. Errors are logged; the rating of a checkpoint
        that could not be kept is lost.
        """
        rated = [key for key in self._awaited if key[1] == step]
        if not rated:
            return
        try:
            complete = [name for name in find_checkpoints(self._storage) if name.step == step]
            for key in rated if complete else ():
                rating, choice = self._awaited.pop(key)
                self._keep(rating, choice, complete[-1].folder)
        except (OSError, DamagedCheckpointError) as error:
            logger.error("the checkpoint of step %d, one of the best, is not kept: %s", step, error)

    def _keep(self, rating: Rating, choice: BestChoice, checkpoint: str) -> None:
        """Copy a checkpoint's files and its rating into a directory of its own, in place of an earlier one for the same
        step, if it is one of the best `choice.keep` by this evaluation and monitor. Remove states that no longer are;
        states by other monitors stay.

        Args:
            checkpoint: the complete checkpoint's folder.
        """
        storage = self._storage
        # Values of another monitor, by which an earlier job chose, cannot be compared with this one: they stay.
        known = (other for other in self._read_ratings(rating.evaluation) if other.monitor == rating.monitor)
        others = [other for other in known if other.step != rating.step]
        ordered = sorted([*others, rating], key=lambda one: (_sort_key(one, choice), one.step))
        kept, dropped = ordered[: choice.keep], ordered[choice.keep :]
        if rating in kept:
            _, files = read_manifest(storage, checkpoint)
            storage.remove(rating.name)
            for name in (*(file.name for file in files), MANIFEST):
                storage.copy(f"{checkpoint}/{name}", f"{rating.name}/{name}")
            storage.write(_rating_file(rating), [msgspec.json.encode(rating)])
        for other in dropped:
            storage.remove(_rating_file(other))
            storage.remove(other.name)

    def _read_ratings(self, evaluation: str) -> list[Rating]:
        """Return the ratings of an evaluation in this directory; other and unreadable files are ignored."""
        found: list[Rating] = []
        for entry in self._storage.entries():
            if not (entry.startswith(f"best-{evaluation}-") and entry.endswith(".json")):
                continue
            try:
                rating = msgspec.json.decode(self._storage.read(entry, _MAX_RATING_BYTES), type=Rating)
            except (OSError, *MALFORMED):
                continue  # An unknown file, which is left alone.
            if rating.evaluation == evaluation and _rating_file(rating) == entry:
                found.append(rating)
        return found


def _rating_file(rating: Rating) -> str:
    return f"{rating.name}.json"


def _sort_key(rating: Rating, choice: BestChoice) -> float:
    return rating.value if choice.mode == "min" else -rating.value
