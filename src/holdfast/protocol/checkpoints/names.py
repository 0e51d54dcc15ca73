"""The names in a checkpoint directory.

A checkpoint is a folder, `step-STEP-tTERM-gGENERATION-NONCE`, and counts once it has a manifest. Different lineages
never have the same name, so a removed writer that wakes up changes only its own files. Names without term and
generation come from earlier versions, and count as older than all others.
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
    """One file of a checkpoint. Its name is not a path."""

    name: FileName
    bytes: Count
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class CheckpointName:
    """The name of a checkpoint, ordered by the lineages of a job."""

    #: term of the writers' plan, or 0 if an earlier version wrote the checkpoint
    term: int
    #: generation of the writers' plan, or 0
    generation: int
    step: int
    #: hexadecimal; another one for each run; "" if an earlier version wrote the checkpoint
    nonce: str = ""

    @property
    def folder(self) -> str:
        """The name of the checkpoint's folder."""
        origin = f"-t{self.term}-g{self.generation}" if self.term or self.generation else ""
        return f"step-{self.step:08d}{origin}" + (f"-{self.nonce}" if self.nonce else "")


def parse_name(name: str) -> CheckpointName:
    """Parse a name from a message or a directory. A path is refused.

    Raises:
        ValueError: it is not the name of a checkpoint.
    """
    match = _NAME.fullmatch(name)
    if match:
        step, term, generation, nonce = match.groups()
        found = CheckpointName(term=int(term or 0), generation=int(generation or 0), step=int(step), nonce=nonce or "")
        if name == found.folder:
            return found
    raise ValueError(f"{name!r} is not the name of a checkpoint")


def newest_lineage(names: Iterable[CheckpointName]) -> list[CheckpointName]:
    """Return the checkpoints that are on the newest lineage, oldest first.

    If a later term or generation has a checkpoint of the same or an earlier step, the job has rolled back to it, and
    later steps of the earlier generation are not on the lineage.
    """
    found: list[CheckpointName] = []
    for name in sorted(names, reverse=True):
        if not found or name.step < found[-1].step:
            found.append(name)
    return found[::-1]
