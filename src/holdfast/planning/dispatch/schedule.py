"""Which rank computes which tokens: one rank's share of an all-to-all, from the gathered counts alone.

The inputs are the tokens `T` routed per expert and source rank, and the replicas `R` per expert and rank, both `(E, N)`
for N ranks. All numbers are integers and equal on every rank. So each rank knows the transfers of all others without
further messages.

With many ranks the tables outgrow the caches, and fresh memory costs more than the arithmetic. So tables are row-major,
use 32 bits if all sums fit, and are changed in place. Intermediate tables are made for one block of experts at a time,
since experts are independent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import cast

import numpy as np

from holdfast.errors import BadInputError
from holdfast.planning.arrays import IntArray, indices

#: The largest sum of a row of a 32-bit table. Some intermediate sums are twice as large.
_MOST_IN_32_BITS = (1 << 30) - 1
#: Numbers in a block: few enough that a block reuses the memory of the last one.
_BLOCK = 1 << 15


@dataclass(frozen=True, kw_only=True, slots=True)
class Surplus:
    """The rest after local tokens have used local capacity. Both tables have the same sum per expert."""

    #: `(E, N)` tokens each rank must send away.
    tokens: IntArray
    #: `(E, N)` capacity each rank still has.
    free: IntArray


class Match(ABC):
    """Surplus tokens matched with free capacity, queried for one rank at a time."""

    @abstractmethod
    def send_row(self, rank: int) -> IntArray:
        """Return surplus tokens per expert that `rank` sends to each rank, `(E, N)`; sums over N: its surplus."""

    @abstractmethod
    def receive_column(self, rank: int) -> IntArray:
        """Return surplus tokens per expert that `rank` gets from each rank, `(E, N)`; sums over N: its capacity."""


class DispatchScheme(ABC):
    """A way to match surplus tokens with free capacity: set up once per step, then queried for rows and columns."""

    #: The name that users give.
    name: str

    def capacities(self, tokens: IntArray, replicas: IntArray) -> IntArray:
        """Return how many tokens of each expert each rank must compute, `(E, N)`.

        By default they are even over the replicas. Every scheme assigns all tokens of an expert, and none to a rank
        without a replica of it.
        """
        return replica_capacities(tokens, replicas)

    @abstractmethod
    def match(self, surplus: Surplus) -> Match:
        """Return the match of `surplus`; it is the same on every rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchSchedule:
    """The schedule of one layer and step. Its tables may be in 32 bits; its rows and columns are in 64 bits."""

    #: `(E, N)` tokens routed per expert and source rank.
    tokens: IntArray
    #: `(E, N)` tokens each rank computes.
    capacities: IntArray
    #: The match of each block of experts.
    matches: tuple[tuple[slice, Match], ...]

    def send_row(self, rank: int) -> IntArray:
        """Return how many tokens per expert `rank` sends to each rank (itself included), `(E, N)`."""
        row = np.empty(self.tokens.shape, dtype=np.int64)
        for block, match in self.matches:
            row[block] = match.send_row(rank)
        row[:, rank] += self._local_tokens(rank)
        return row

    def receive_column(self, rank: int) -> IntArray:
        """Return how many tokens per expert `rank` gets from each rank (itself included), `(E, N)`."""
        column = np.empty(self.tokens.shape, dtype=np.int64)
        for block, match in self.matches:
            column[block] = match.receive_column(rank)
        column[:, rank] += self._local_tokens(rank)
        return column

    def _local_tokens(self, rank: int) -> IntArray:
        """Return the rank's own tokens that it computes itself, `(E,)`."""
        return np.minimum(self.tokens[:, rank], self.capacities[:, rank])


def dispatch_schedule(tokens: IntArray, replicas: IntArray, scheme: DispatchScheme) -> DispatchSchedule:
    """Prepare the schedule of one layer from `tokens` T `(E, N)` and `replicas` R `(E, N)` (DESIGN, Token dispatch).

    Every token is sent exactly once. A rank's own tokens use its capacity first.

    Raises:
        BadInputError: Shapes differ, numbers are negative, or an expert with tokens has no replica.
    """
    tokens, replicas = _check_tables(tokens, replicas)
    capacities = scheme.capacities(tokens, replicas)
    matches = [
        (block, scheme.match(_subtract_local(tokens[block], capacities[block])))
        for block in _expert_blocks(*tokens.shape)
    ]
    return DispatchSchedule(tokens=tokens, capacities=capacities, matches=tuple(matches))


def _expert_blocks(experts: int, ranks: int) -> list[slice]:
    """Return the blocks of experts that are planned one after the other."""
    step = max(_BLOCK // max(ranks, 1), 1)
    return [slice(start, min(start + step, experts)) for start in range(0, experts, step)]


def _subtract_local(tokens: IntArray, capacities: IntArray) -> Surplus:
    """Subtract the local tokens that fit into the local capacity from both tables `(E, N)`."""
    local = np.minimum(tokens, capacities)
    return Surplus(tokens=tokens - local, free=np.subtract(capacities, local, out=local))


def replica_capacities(tokens: IntArray, replicas: IntArray) -> IntArray:
    """Return tokens per expert and rank `(E, N)`, even over the expert's replicas to one token.

    Each replica computes floor(t / r) tokens, and t mod r replicas one more. Replicas with a local token for it come
    first. The others follow in rank order, starting at a different rank for each expert, so that no rank collects all
    the extra tokens.
    """
    capacities = np.empty(tokens.shape, dtype=tokens.dtype)
    start = indices(tokens.shape[0]) % max(tokens.shape[1], 1)
    for block in _expert_blocks(*tokens.shape):
        capacities[block] = _even_over_replicas(tokens[block], replicas[block], start[block])
    return capacities


def _even_over_replicas(tokens: IntArray, replicas: IntArray, start: IntArray) -> IntArray:
    """Return capacities `(E, N)`: floor(t / r) tokens for each replica, and the t mod r others one more each.

    These are first replicas with local tokens beyond their share, then others in rank order from `start` `(E,)` on.
    """
    total, number = row_sums(tokens), np.maximum(row_sums(replicas), 1)
    each, over = np.divmod(total, number)
    capacities = each * replicas
    if not over.any():
        return capacities
    near = tokens - capacities
    np.minimum(np.maximum(near, 0, out=near), replicas, out=near)
    granted = _serve_in_turn(near, over, start)
    capacities += granted
    over -= row_sums(granted)
    if over.any():
        capacities += _serve_in_turn(replicas - granted, over, start)
    return capacities


def row_sums(table: IntArray) -> IntArray:
    """Return the sums `(E, 1)` of the rows of `table` `(E, N)`, in its own integer width."""
    return np.add.reduce(table, axis=1, keepdims=True, dtype=table.dtype)


def row_ends(table: IntArray) -> IntArray:
    """Return the end of each interval on its row's line, `(E, N)`, in the integer width of `table` `(E, N)`."""
    return np.add.accumulate(table, axis=1, dtype=table.dtype)


def interval_lengths(ends: IntArray, begin: IntArray | int) -> IntArray:
    """Return the length of each interval of a line, `(E, N)`, from the `ends` `(E, N)` and the start of the line
    `(E, 1)`.
    """
    lengths = np.empty_like(ends)
    lengths[:, :1] = ends[:, :1] - begin
    np.subtract(ends[:, 1:], ends[:, :-1], out=lengths[:, 1:])
    return lengths


def _serve_in_turn(wanted: IntArray, supply: IntArray, start: IntArray) -> IntArray:
    """Return how much each rank gets of `wanted` `(E, N)`, at most `supply` `(E, 1)` per expert.

    Ranks are served fully, one after the other, from rank start[e] on and wrapping around, until nothing is left.
    `wanted` itself is returned if the supply suffices.
    """
    if (row_sums(wanted) <= supply).all():
        return wanted
    ends = row_ends(wanted)
    total = ends[:, -1:].copy()
    before = np.subtract(ends, wanted, out=ends)
    skipped = before[indices(wanted.shape[0]), start][:, None]
    left = np.subtract(supply + skipped, before, out=before)
    # The ranks before the start come last.
    turn = indices(int(start.max()))
    left[:, : turn.size] -= (turn < start[:, None]) * total
    return np.minimum(np.maximum(left, 0, out=left), wanted, out=left)


def _check_tables(tokens: IntArray, replicas: IntArray) -> tuple[IntArray, IntArray]:
    """Return both tables row-major, in 32 bits if all sums fit; raise `BadInputError` if no schedule can exist."""
    if tokens.ndim != 2 or tokens.shape != replicas.shape:
        raise BadInputError(
            f"tokens have shape {tokens.shape}, replicas {replicas.shape}: both must be [experts, ranks]"
        )
    if int(tokens.min(initial=0)) < 0 or int(replicas.min(initial=0)) < 0:
        raise BadInputError("tokens and replicas must be >= 0")
    total, number = tokens.sum(axis=1), replicas.sum(axis=1)
    homeless = (total > 0) & (number == 0)
    if homeless.any():
        expert = int(np.flatnonzero(homeless)[0])
        raise BadInputError(f"expert {expert} has {int(total[expert])} tokens but no replica: place it first")
    fits = max(int(total.max(initial=0)), int(number.max(initial=0))) <= _MOST_IN_32_BITS
    return _as_row_major(tokens, fits), _as_row_major(replicas, fits)


def _as_row_major(table: IntArray, fits: bool) -> IntArray:
    """Return `table` `(E, N)` row-major, in 32 bits if it `fits`. The type stays IntArray for the checker."""
    # Gathered counts are column-major. Narrowing first leaves less memory to transpose.
    return np.ascontiguousarray(cast(IntArray, table.astype(np.int32)) if fits else table)
