"""Proposals on which the workers of a replica group agree before they act together (docs/layouts.md, rules 4 and 9)."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class ProposalKind(IntEnum):
    """The proposed action: a computation, or the use of a received state."""

    MICRO_BATCH = 0
    EVALUATION = 1
    SHADOW = 2
    STATE = 3


class Proposal(NamedTuple):
    """The next action of a worker: a micro-batch, a shard of an evaluation, a shadow step, or an `adoption`."""

    generation: int
    step: int
    number: int
    kind: ProposalKind = ProposalKind.MICRO_BATCH


def adoption(generation: int) -> Proposal:
    """Return the proposal of a worker to replace its state by a complete received one."""
    return Proposal(generation, 0, 0, ProposalKind.STATE)
