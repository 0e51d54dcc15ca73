"""What the places of a unit agree on before they do it together (docs/layouts.md, rules 4 and 9)."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class ProposalKind(IntEnum):
    """What is to be done: something to be computed, or a state that has come to be taken."""

    MICRO_BATCH = 0
    EVALUATION = 1
    SHADOW = 2
    STATE = 3


class Proposal(NamedTuple):
    """What a place is about to do: a micro-batch, a shard of an evaluation, a shadow step's micro-batch; `adoption`."""

    generation: int
    step: int
    number: int
    kind: ProposalKind = ProposalKind.MICRO_BATCH


def adoption(generation: int) -> Proposal:
    """Return what a place proposes that has a whole state which is to take the place of the one it keeps, or has."""
    return Proposal(generation, 0, 0, ProposalKind.STATE)
