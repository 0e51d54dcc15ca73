"""What the places of a unit agree on before they compute it together (docs/layouts.md, rule 4)."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class ProposalKind(IntEnum):
    """What is to be computed."""

    MICRO_BATCH = 0
    EVALUATION = 1
    SHADOW = 2


class Proposal(NamedTuple):
    """What a place is about to compute: a micro-batch, a shard of an evaluation, or a shadow step's micro-batch."""

    generation: int
    step: int
    number: int
    kind: ProposalKind = ProposalKind.MICRO_BATCH
