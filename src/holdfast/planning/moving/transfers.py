"""Which node sends which expert to which node, with even work for the senders (Lazarus, 4.3).

Axes: L layers, E experts, N nodes, M transfers.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from holdfast.planning.arrays import BoolArray, IntArray, count_true, indices, nonzero_indices

#: Up to this many transfers, senders are chosen one by one and then improved to the optimum. More are done in chunks.
_EXACT_UP_TO_TRANSFERS = 2048
#: Transfers x nodes up to which each sender is chosen among all owners.
_MOST_CHOICES = 1 << 25
#: With more transfers, the number of owners considered for each.
_ASKED = 8
#: The offset, a prime, between the first owners considered for one expert and for the next.
_STRIDE = 7919


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfers:
    """One copy of one expert per entry, `(M,)` each; the experts with the fewest live copies come first."""

    layer: IntArray
    expert: IntArray
    source: IntArray
    destination: IntArray

    def __len__(self) -> int:
        return int(self.layer.size)

    def as_tuples(self) -> list[tuple[int, int, int, int]]:
        """Return (layer, expert, source, destination) per transfer."""
        columns = (self.layer, self.expert, self.source, self.destination)
        return [
            (int(layer), int(expert), int(source), int(to)) for layer, expert, source, to in zip(*columns, strict=True)
        ]


def plan_transfers(
    held: IntArray | BoolArray, wanted: IntArray | BoolArray, *, node_of: IntArray | None = None
) -> tuple[Transfers, tuple[tuple[int, int], ...]]:
    """Return the transfers from `held` to `wanted`, and the wanted (layer, expert) pairs of which no copy exists.

    The busiest sender sends as little as possible; for up to 2048 transfers this is exact.

    Args:
        held: `(L, E, N)` replicas, or booleans, that exist now.
        wanted: `(L, E, N)` replicas, or booleans, of the new placement.
        node_of: `(N,)`; if given, the columns are workers, and these are their nodes. A worker then receives from its
            own node if that has a copy.
    """
    have = held.astype(np.bool_, copy=False)
    missing = wanted.astype(np.bool_, copy=False) & ~have
    layer, expert, destination = nonzero_indices(missing)
    live = count_true(have)[layer, expert]
    alive = live > 0
    lost = tuple(dict.fromkeys(zip(layer[~alive].tolist(), expert[~alive].tolist(), strict=True)))
    layer, expert, destination, live = layer[alive], expert[alive], destination[alive], live[alive]
    nth = _number_requests(layer, expert)
    # Experts with few copies come first, and the first missing copy of an expert before its second one.
    order = np.lexsort((nth, live + nth))
    layer, expert, destination = layer[order], expert[order], destination[order]
    if node_of is None and layer.size * have.shape[2] > _MOST_CHOICES:
        source = _choose_from_few_owners(have, layer, expert, nth[order])
        return Transfers(layer=layer, expert=expert, source=source, destination=destination), lost
    owners = have[layer, expert]
    if node_of is not None:
        near = owners & (node_of[None, :] == node_of[destination, None])
        owners = np.where(near.any(axis=1, keepdims=True), near, owners)
    source = choose_senders(owners)
    return Transfers(layer=layer, expert=expert, source=source, destination=destination), lost


def _choose_from_few_owners(have: BoolArray, layer: IntArray, expert: IntArray, nth: IntArray) -> IntArray:
    """Return an owner for each request `(M,)`, chosen from a few candidates.

    `nth` numbers the requests for one expert. The candidates are some owners of the expert according to `have`
    `(L, E, N)`, different ones for each request. The candidate that sends least so far is chosen.
    """
    pair, pair_of = np.unique(layer * have.shape[1] + expert, return_inverse=True)
    owners = have.reshape(-1, have.shape[2])[pair]
    number = owners.sum(axis=1)
    first = (np.cumsum(number) - number)[pair_of]
    # Start with a different owner for each expert, since adjacent experts often have the same owners.
    turn = nth * _ASKED + pair[pair_of] * _STRIDE
    asked = nonzero_indices(owners)[1][first[:, None] + (turn[:, None] + indices(_ASKED)) % number[pair_of][:, None]]
    sent = np.zeros(have.shape[2], dtype=np.int64)
    source = np.empty_like(layer)
    step = max(have.shape[2] // 4, layer.size // 512)
    for start in range(0, layer.size, step):
        choice = asked[start : start + step]
        source[start : start + step] = choice[indices(len(choice)), sent[choice].argmin(axis=1)]
        sent += np.bincount(source[start : start + step], minlength=sent.size)
    return source


def _number_requests(layer: IntArray, expert: IntArray) -> IntArray:
    """Number the requests for one expert 0, 1, ...; requests for one expert must be adjacent."""
    if not layer.size:
        return layer
    starts = np.r_[True, (layer[1:] != layer[:-1]) | (expert[1:] != expert[:-1])]
    index = indices(layer.size)
    return index - np.maximum.accumulate(np.where(starts, index, 0))


def choose_senders(owners: BoolArray) -> IntArray:
    """Return one of the `owners` `(M, N)` for each transfer, such that the busiest sender sends little.

    Each transfer takes its least busy owner so far. If there are few transfers, they are then shifted along chains of
    owners until no chain relieves the busiest sender. Then it sends as little as possible (an optimal semi-matching).
    """
    transfers, nodes = owners.shape
    sent = np.zeros(nodes, dtype=np.int64)
    source = np.empty(transfers, dtype=np.int64)
    exact = transfers <= _EXACT_UP_TO_TRANSFERS
    if exact:
        _choose_one_by_one(owners, source, sent)
        _relieve_busiest(owners, source, sent)
        return source
    step = max(nodes // 2, transfers // 256)
    rotation = indices(nodes)
    for start in range(0, transfers, step):
        chunk = owners[start : start + step]
        # Ties inside a chunk go to a different owner for each transfer.
        tie = (rotation[None, :] - (start + indices(chunk.shape[0]))[:, None]) % nodes
        rank = np.where(chunk, sent[None, :] * nodes + tie, np.iinfo(np.int64).max)
        chosen = rank.argmin(axis=1)
        source[start : start + step] = chosen
        sent += np.bincount(chosen, minlength=nodes)
    return source


def _choose_one_by_one(owners: BoolArray, source: IntArray, sent: IntArray) -> None:
    """Choose the least busy owner for each transfer in turn; change `source` and `sent` in place."""
    transfer_of, owner_of = np.nonzero(owners)
    choices: list[list[int]] = [[] for _ in source]
    for transfer, owner in zip(transfer_of.tolist(), owner_of.tolist(), strict=True):
        choices[transfer].append(owner)
    load = sent.tolist()
    for transfer, mine in enumerate(choices):
        chosen = min(mine, key=load.__getitem__)
        source[transfer] = chosen
        load[chosen] += 1
    sent[:] = load


def _relieve_busiest(owners: BoolArray, source: IntArray, sent: IntArray) -> None:
    """Shift transfers along chains from the busiest sender to idler ones, in place, until no chain is left."""
    while source.size:
        chain = _find_chain(owners, source, sent, int(sent.argmax()))
        if chain is None:
            return
        for transfer, receiver in chain:
            sent[source[transfer]] -= 1
            source[transfer] = receiver
            sent[receiver] += 1


def _find_chain(owners: BoolArray, source: IntArray, sent: IntArray, start: int) -> list[tuple[int, int]] | None:
    """Return the shortest chain of (transfer, new source) steps that relieves `start`; None without a chain.

    The search is breadth-first. The chain ends at a sender with at least two transfers fewer.
    """
    came_from: dict[int, tuple[int, int]] = {}
    queue = deque([start])
    while queue:
        sender = queue.popleft()
        if sent[sender] <= sent[start] - 2:
            return _collect_chain(came_from, source, sender, start)
        mine = np.flatnonzero(source == sender)
        reachable = owners[mine]
        for receiver in np.flatnonzero(reachable.any(axis=0)):
            node = int(receiver)
            if node != start and node not in came_from:
                came_from[node] = (int(mine[int(reachable[:, node].argmax())]), sender)
                queue.append(node)
    return None


def _collect_chain(
    came_from: dict[int, tuple[int, int]], source: IntArray, end: int, start: int
) -> list[tuple[int, int]]:
    """Return the (transfer, new source) steps of a chain in the order in which to apply them, from `start` to `end`.

    `came_from` has, for each sender on the way to `end`, the transfer that it takes over and the sender before it.
    """
    steps: list[tuple[int, int]] = []
    node = end
    while node != start:
        transfer, sender = came_from[node]
        steps.append((transfer, node))
        node = sender
    return steps[::-1]
