"""The best states by an evaluation, kept beyond the checkpoints that newer ones supersede.

Each is a checkpoint like others, under `best-NAME-STEP` beside them: its files are those of the checkpoint of that step
(hard links where the file system has them), so that it takes room only once that one is gone. `best-NAME-STEP.json`
says by which value it is there. Nothing resumes from them, and the files alone say which they are: they outlive jobs.
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

#: of steps that were rated and whose checkpoint is not there yet
_AWAITED = 16
_MAX_RATING_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class BestChoice:
    """Which evaluated states are kept: the `keep` best by the value of `monitor`, least or greatest (`mode`)."""

    monitor: str
    mode: Literal["min", "max"]
    keep: int


class Rating(msgspec.Struct, frozen=True, kw_only=True):
    """Of a state: at which step which evaluation has found what, a finite number."""

    evaluation: str
    step: int
    monitor: str
    value: float

    @property
    def name(self) -> str:
        """Of its directory."""
        return f"best-{self.evaluation}-{self.step:08d}"


class BestStates:
    """Those of one checkpoint directory; for the saver's thread."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._awaited: dict[tuple[str, int], tuple[Rating, BestChoice]] = {}

    def add_rating(self, rating: Rating, choice: BestChoice) -> None:
        """A state was evaluated: keep it if it is one of the best, now or once its checkpoint is there."""
        self._awaited[rating.evaluation, rating.step] = rating, choice
        while len(self._awaited) > _AWAITED:
            del self._awaited[next(iter(self._awaited))]
        self.keep_rated(rating.step)

    def on_complete(self, step: int) -> None:
        """A checkpoint counts: keep it if it was rated, and say which older ones it has overtaken."""
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
        """Keep what was rated of a step, where its checkpoint is there."""
        rated = [key for key in self._awaited if key[1] == step]
        if not rated:
            return
        try:
            there = [name for name in find_checkpoints(self._storage) if name.step == step]
            for key in rated if there else ():
                rating, choice = self._awaited.pop(key)
                self._keep(rating, choice, there[-1].folder)
        except (OSError, DamagedCheckpointError) as error:
            logger.error("the checkpoint of step %d, one of the best, is not kept: %s", step, error)

    def _keep(self, rating: Rating, choice: BestChoice, checkpoint: str) -> None:
        storage = self._storage
        # Values of another monitor, by which an earlier job chose, cannot be compared with this one: they stay.
        known = (other for other in self._read_ratings(rating.evaluation) if other.monitor == rating.monitor)
        others = [other for other in known if other.step != rating.step]
        ordered = sorted([*others, rating], key=lambda one: (_sort_key(one, choice), one.step))
        stay, go = ordered[: choice.keep], ordered[choice.keep :]
        if rating in stay:
            _, files = read_manifest(storage, checkpoint)
            storage.remove(rating.name)
            for name in (*(file.name for file in files), MANIFEST):
                storage.copy(f"{checkpoint}/{name}", f"{rating.name}/{name}")
            storage.write(_rating_file(rating), [msgspec.json.encode(rating)])
        for one in go:
            storage.remove(_rating_file(one))
            storage.remove(one.name)

    def _read_ratings(self, evaluation: str) -> list[Rating]:
        found: list[Rating] = []
        for entry in self._storage.entries():
            if not (entry.startswith(f"best-{evaluation}-") and entry.endswith(".json")):
                continue
            try:
                rating = msgspec.json.decode(self._storage.read(entry, _MAX_RATING_BYTES), type=Rating)
            except (OSError, *MALFORMED):
                continue  # (nobody knows what it is: left alone)
            if rating.evaluation == evaluation and _rating_file(rating) == entry:
                found.append(rating)
        return found


def _rating_file(rating: Rating) -> str:
    return f"{rating.name}.json"


def _sort_key(rating: Rating, choice: BestChoice) -> float:
    return rating.value if choice.mode == "min" else -rating.value
