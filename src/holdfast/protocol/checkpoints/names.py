"""The names in a checkpoint directory.

A checkpoint is a folder, `step-STEP-tTERM-gGENERATION-NONCE`, which counts from when its manifest lies in it: no two
lineages ever have a name in common, so that a writer that was expelled and wakes up touches nothing but its own. Names
without term and generation are those of earlier versions, older than all others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from holdfast.protocol.names import Count, Struct

_NAME = re.compile(r"step-([0-9]{8,15})(?:-t([0-9]{1,15})-g([0-9]{1,15}))?(?:-([0-9a-f]{1,32}))?")


FileName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]


class StoredFile(Struct, frozen=True, kw_only=True, tag="StoredFile"):
    """One file of a checkpoint, as it was written; `name` is no path."""

    name: FileName
    bytes: Count
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class CheckpointName:
    """What the name of a checkpoint says: whose it is; they are in the order in which a job's lineages follow.

    `term` and `generation` are those of the writers' plan, 0 where an earlier version wrote it. `nonce`: hex, new for
    each run, "" likewise.
    """

    term: int
    generation: int
    step: int
    nonce: str = ""

    @property
    def folder(self) -> str:
        """The name of the checkpoint's folder."""
        origin = f"-t{self.term}-g{self.generation}" if self.term or self.generation else ""
        return f"step-{self.step:08d}{origin}" + (f"-{self.nonce}" if self.nonce else "")


def parse_name(name: str) -> CheckpointName:
    """Return what a name that came from elsewhere says, if it is one of ours: never a path.

    Raises:
        ValueError: it is not.
    """
    match = _NAME.fullmatch(name)
    if match:
        step, term, generation, nonce = match.groups()
        found = CheckpointName(term=int(term or 0), generation=int(generation or 0), step=int(step), nonce=nonce or "")
        if name == found.folder:
            return found
    raise ValueError(f"{name!r} is no name of a checkpoint")


def on_one_lineage(names: Iterable[CheckpointName]) -> list[CheckpointName]:
    """Return those of kept checkpoints that can lie on one lineage, the newest one's, in its order.

    A later term or generation that has a checkpoint of the same or of an earlier step has gone back there: what the
    earlier one had beyond was abandoned.
    """
    found: list[CheckpointName] = []
    for name in sorted(names, reverse=True):
        if not found or name.step < found[-1].step:
            found.append(name)
    return found[::-1]
