"""Which rank computes which tokens: one rank's share of an all-to-all, from the gathered counts alone.

`T` tokens routed per expert and source rank, `R` replicas per expert and rank, both `[E, N]`; N is the number of ranks.
All numbers are integers and the same on every rank, so no rank needs to be told what the others do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from holdfast.errors import BadInputError
from holdfast.planning.arrays import IntArray, indices


@dataclass(frozen=True, kw_only=True, slots=True)
class Surplus:
    """What is left once local tokens have taken local capacity; both sum to the same over the ranks, per expert."""

    #: `[E, N]` tokens each rank must send away.
    tokens: IntArray
    #: `[E, N]` capacity each rank still has.
    free: IntArray


class Match(ABC):
    """Surplus tokens matched with free capacity, asked for one rank at a time."""

    @abstractmethod
    def send_row(self, rank: int) -> IntArray:
        """Return surplus tokens per expert that *rank* sends to each rank, `[E, N]`; sums over N: its surplus."""

    @abstractmethod
    def receive_column(self, rank: int) -> IntArray:
        """Return surplus tokens per expert that *rank* gets from each rank, `[E, N]`; sums over N: its capacity."""


class DispatchScheme(ABC):
    """A way to match surplus tokens with free capacity: set up once per step, then asked for rows and columns."""

    #: What users call it.
    name: str

    def capacities(self, tokens: IntArray, replicas: IntArray) -> IntArray:
        """Return how many tokens of each expert each rank is to compute, `[E, N]`; even over the replicas, unless a
        scheme knows better. All of an expert's tokens, and none where it has no replica."""
        return replica_capacities(tokens, replicas)

    @abstractmethod
    def match(self, surplus: Surplus) -> Match:
        """Return the match of *surplus*; the same on every rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchSchedule:
    """The schedule of one layer and step."""

    #: `[E, N]` tokens that stay where they are.
    local: IntArray
    #: `[E, N]` tokens each rank computes.
    capacities: IntArray
    match: Match

    def send_row(self, rank: int) -> IntArray:
        """Return how many tokens per expert *rank* sends to each rank (itself included), `[E, N]`."""
        row = self.match.send_row(rank)
        row[:, rank] += self.local[:, rank]
        return row

    def receive_column(self, rank: int) -> IntArray:
        """Return how many tokens per expert *rank* gets from each rank (itself included), `[E, N]`."""
        column = self.match.receive_column(rank)
        column[:, rank] += self.local[:, rank]
        return column


def dispatch_schedule(tokens: IntArray, replicas: IntArray, scheme: DispatchScheme) -> DispatchSchedule:
    """Prepare the schedule of one layer from *tokens* T `[E, N]` and *replicas* R `[E, N]` (DESIGN, Token dispatch).

    Every token is sent exactly once; a rank's own tokens take its capacity first.

    Raises `BadInputError` where shapes differ, numbers are negative, or an expert with tokens has no replica.
    """
    _check(tokens, replicas)
    capacities = scheme.capacities(tokens, replicas)
    local = np.minimum(tokens, capacities)
    surplus = Surplus(tokens=tokens - local, free=capacities - local)
    return DispatchSchedule(local=local, capacities=capacities, match=scheme.match(surplus))


def replica_capacities(tokens: IntArray, replicas: IntArray) -> IntArray:
    """Return tokens per expert and rank `[E, N]`, evened out over the expert's replicas to one token.

    Each replica computes floor(t / r) tokens, and t mod r of them one more: first those whose rank has a local token
    for it, then in rank order starting at a different rank for each expert, so that no rank collects all of them.
    """
    total = tokens.sum(axis=1, keepdims=True)
    number = np.maximum(replicas.sum(axis=1, keepdims=True), 1)
    each, over = np.divmod(total, number)
    capacities = each * replicas
    if not over.any():
        return capacities
    start = indices(replicas.shape[0]) % replicas.shape[1]
    granted = _grant(np.clip(tokens - capacities, 0, replicas), over, start)
    capacities += granted
    over = over - granted.sum(axis=1, keepdims=True)
    return capacities + _grant(replicas - granted, over, start) if over.any() else capacities


def _grant(wanted: IntArray, supply: IntArray, start: IntArray) -> IntArray:
    """Serve *wanted* `[E, N]` from *supply* `[E, 1]`, rank by rank from rank start[e] round to it again."""
    upto = np.cumsum(wanted, axis=1)
    before = upto - wanted
    experts = indices(wanted.shape[0])
    skipped = before[experts, start][:, None]
    wrapped = indices(wanted.shape[1])[None, :] < start[:, None]
    before -= skipped
    before += wrapped * upto[:, -1:]
    return np.minimum(np.maximum(supply - before, 0), wanted)


def _check(tokens: IntArray, replicas: IntArray) -> None:
    """Raise where no schedule can exist."""
    if tokens.ndim != 2 or tokens.shape != replicas.shape:
        raise BadInputError(
            f"tokens have shape {tokens.shape}, replicas {replicas.shape}: both must be [experts, ranks]"
        )
    if int(tokens.min(initial=0)) < 0 or int(replicas.min(initial=0)) < 0:
        raise BadInputError("tokens and replicas must be >= 0")
    homeless = tokens.any(axis=1) & ~replicas.any(axis=1)
    if homeless.any():
        expert = int(np.flatnonzero(homeless)[0])
        raise BadInputError(f"expert {expert} has {int(tokens[expert].sum())} tokens but no replica: place it first")
