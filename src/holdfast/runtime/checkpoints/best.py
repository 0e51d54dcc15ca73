"""The best states by an evaluation, kept beyond the checkpoints that newer ones supersede.

Each is a checkpoint like others, under `best-NAME-STEP` beside them: its files are those of the checkpoint of that step
(hard links where the file system has them), so that it takes room only once that one is gone. `best-NAME-STEP.json`
says by which value it is there. Nothing resumes from them, and the files alone say which they are: they outlive jobs.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from holdfast.protocol.checkpoint_dir import find_checkpoints

logger = logging.getLogger(__name__)

#: of steps that were rated and whose checkpoint is not there yet
_AWAITED = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class BestChoice:
    """Which evaluated states are kept: the `keep` best by the value of `monitor`, least or greatest (`mode`)."""

    monitor: str
    mode: Literal["min", "max"]
    keep: int


class Rating(msgspec.Struct, frozen=True, kw_only=True):
    """Of a state: at which step which evaluation has found what; a value that is no number is worse than all."""

    evaluation: str
    step: int
    monitor: str
    value: float | None

    @property
    def name(self) -> str:
        """Of its directory."""
        return f"best-{self.evaluation}-{self.step:08d}"


class BestStates:
    """Those of one checkpoint directory; for the saver's thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._awaited: dict[tuple[str, int], tuple[Rating, BestChoice]] = {}

    def rate(self, rating: Rating, choice: BestChoice) -> None:
        """A state was evaluated: keep it if it is one of the best, now or once its checkpoint is there."""
        self._awaited[rating.evaluation, rating.step] = rating, choice
        while len(self._awaited) > _AWAITED:
            del self._awaited[next(iter(self._awaited))]
        self.look(rating.step)

    def look(self, step: int) -> None:
        """Keep what was rated of a step, where its checkpoint is there."""
        there = [name for name in find_checkpoints(self._directory) if name.step == step]
        rated = [key for key in self._awaited if key[1] == step]
        for key in rated if there else ():
            rating, choice = self._awaited.pop(key)
            try:
                self._keep(rating, choice, self._directory / there[-1].final)
            except OSError as error:
                logger.error("the checkpoint of step %d, one of the best, is not kept: %s", step, error)

    def _keep(self, rating: Rating, choice: BestChoice, checkpoint: Path) -> None:
        others = [other for other in self._known(rating.evaluation) if other.step != rating.step]
        ordered = sorted([*others, rating], key=lambda one: (_badness(one, choice), one.step))
        stay, go = ordered[: choice.keep], ordered[choice.keep :]
        if rating in stay:
            target, partial = self._directory / rating.name, self._directory / f".{rating.name}"
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(checkpoint, partial, copy_function=_link)
            shutil.rmtree(target, ignore_errors=True)
            self._said(rating).write_bytes(msgspec.json.encode(rating))
            partial.rename(target)
        for one in go:
            self._said(one).unlink(missing_ok=True)
            shutil.rmtree(self._directory / one.name, ignore_errors=True)

    def _known(self, evaluation: str) -> list[Rating]:
        found: list[Rating] = []
        for path in self._directory.glob(f"best-{evaluation}-*.json"):
            try:
                rating = msgspec.json.decode(path.read_bytes(), type=Rating)
            except (OSError, msgspec.DecodeError):
                continue  # (nobody knows what it is: left alone)
            if rating.evaluation == evaluation and self._said(rating) == path:
                found.append(rating)
        return found

    def _said(self, rating: Rating) -> Path:
        return self._directory / f"{rating.name}.json"


def _badness(rating: Rating, choice: BestChoice) -> float:
    if rating.value is None or math.isnan(rating.value):
        return math.inf
    return rating.value if choice.mode == "min" else -rating.value


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
