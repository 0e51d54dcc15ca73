"""Keeps the replicas that workers hold, and moves only the missing ones. It needs no search and takes milliseconds.

After a loss of nodes, it first restores the guarantee of f with the fewest evictions. Unused room, such as a joining
node's, is filled by the loads. The searches of `best.py` can later find a placement that survives or gains more.

Axes: L layers, E experts, N nodes, W workers, R replicas. Slots belong to workers; distinct hosts are nodes.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from holdfast.planning.arrays import BoolArray, IntArray, count_true, indices

#: Marks a slot without an expert.
_FREE = -1
#: A cost that is larger than any number of slots.
_NEVER = 1 << 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicas:
    """Expert replicas on workers, one per entry, `(R,)` each; one worker may have several of one expert."""

    layer: IntArray
    expert: IntArray
    worker: IntArray

    def __len__(self) -> int:
        return int(self.layer.size)

    def select(self, which: BoolArray) -> Replicas:
        """Return the replicas that `which` `(R,)` selects."""
        return Replicas(layer=self.layer[which], expert=self.expert[which], worker=self.worker[which])

    def concatenate(self, *more: Replicas) -> Replicas:
        """Return these replicas followed by `more`."""
        every = (self, *more)
        return Replicas(
            layer=np.concatenate([these.layer for these in every]),
            expert=np.concatenate([these.expert for these in every]),
            worker=np.concatenate([these.worker for these in every]),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Repair:
    """The changes that make a placement fit after node losses: the replicas that stay, and new ones."""

    #: `(R,)` whether each held replica stays.
    stays: BoolArray
    #: The new replicas.
    added: Replicas


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerRoom:
    """The slots of the workers, with their nodes and racks."""

    #: `(W,)` slots per layer of each worker.
    slots: IntArray
    #: `(W,)` the node of each worker.
    node: IntArray
    #: `(N,)` the rack of each node; None if racks do not matter.
    racks: IntArray | None = None

    @property
    def nodes(self) -> int:
        return int(self.node.max()) + 1


def make_worker_room(slots: IntArray, workers: IntArray, racks: IntArray | None = None) -> WorkerRoom:
    """Return the room of the workers of nodes with `slots` `(N,)` per layer.

    `workers` `(W,)` is the node of each worker. As in `split_over_workers`, the slots of a node are shared among its
    workers so that they differ by at most one.
    """
    order = np.argsort(workers, kind="stable")
    number = np.bincount(workers, minlength=slots.size)
    starts = np.cumsum(number) - number
    turn = np.empty_like(workers)
    turn[order] = indices(workers.size) - starts[workers[order]]
    share = (slots[workers] - turn + number[workers] - 1) // number[workers]
    return WorkerRoom(slots=np.maximum(share, 0), node=workers, racks=racks)


def keep_and_repair(held: Replicas, wanted: IntArray, room: WorkerRoom, threshold: int) -> Repair | None:
    """Return a placement that keeps the held replicas as far as the guarantee of `threshold` distinct nodes allows.

    Every slot of every layer is used. A worker that holds more replicas of some layer than it has slots keeps only the
    replicas that it is assigned again.

    Args:
        held: The replicas that workers hold.
        wanted: `(L, E)` replicas by the experts' loads: as many as there are slots, and at least `threshold` of each.
        room: The slots of the workers.
        threshold: At most the value that `allocate` gives; then it is kept.

    Returns:
        The changes; None if no replica can be kept.
    """
    layers, workers = wanted.shape[0], room.slots.size
    used = np.bincount(held.worker * layers + held.layer, minlength=workers * layers).reshape(workers, layers)
    crowded = np.zeros(workers, dtype=np.bool_)
    crowded[np.flatnonzero((used > room.slots[:, None]).sum(axis=1))] = True
    stays = ~crowded[held.worker]
    if not stays.any():
        return None
    added = _restore_guarantee(held, stays, wanted, room, threshold)
    return Repair(
        stays=stays, added=added.concatenate(_fill_free_slots(held.select(stays).concatenate(added), wanted, room))
    )


# ---- the guarantee ----


def _restore_guarantee(
    held: Replicas, stays: BoolArray, wanted: IntArray, room: WorkerRoom, threshold: int
) -> Replicas:
    """Give every expert its distinct nodes, in each layer in which some lack; return the added replicas.

    Args:
        held: The replicas that workers hold.
        stays: Which of the held replicas stay; changed in place.
        wanted: As for `keep_and_repair`.
        room: The slots of the workers.
        threshold: As for `keep_and_repair`.
    """
    layers, experts = wanted.shape
    hosted = np.zeros(layers * experts * room.nodes, dtype=np.bool_)
    hosted[(held.layer * experts + held.expert)[stays] * room.nodes + room.node[held.worker[stays]]] = True
    hosts = count_true(hosted.reshape(layers, experts, room.nodes))
    added = [held.select(np.zeros_like(stays))]
    for layer in np.flatnonzero((hosts < threshold).any(axis=1)):
        mine = np.flatnonzero(stays & (held.layer == layer))
        table = _LayerSlots(held.expert[mine], held.worker[mine], wanted[layer], room, threshold)
        table.restore_guarantee()
        stays[mine[table.find_departed()]] = False
        added.append(table.find_added(int(layer)))
    return added[0].concatenate(*added[1:])


class _LayerSlots:
    """One layer's slots and the experts in them."""

    def __init__(self, expert: IntArray, worker: IntArray, wanted: IntArray, room: WorkerRoom, threshold: int) -> None:
        """Start with these replicas; slots without a replica are free."""
        workers = room.slots.size
        free = room.slots - np.bincount(worker, minlength=workers)
        self._worker = np.concatenate((worker, np.repeat(indices(workers), free)))
        self._expert = np.concatenate((expert, np.full(int(free.sum()), _FREE, dtype=np.int64)))
        self._before = self._expert.copy()
        self._node = room.node[self._worker]
        #: `(E + 1, N)` replicas of each expert on each node; the last row counts the free slots.
        self._counts = np.zeros((wanted.size + 1, room.nodes), dtype=np.int32)
        np.add.at(self._counts, (self._expert, self._node), 1)
        self._hosts = (self._counts[:-1] > 0).sum(axis=1)
        self._total = self._counts[:-1].sum(axis=1)
        self._wanted = wanted
        self._racks = room.racks
        self._threshold = threshold
        #: `(E, W)` whether a worker had an expert before.
        self._had = np.zeros((wanted.size, workers), dtype=np.bool_)
        self._had[expert, worker] = True
        #: A lower bound of the copies that the next host takes; it never decreases.
        self._least = 1

    def restore_guarantee(self) -> None:
        """Give every expert its distinct nodes, the rarest expert first, as far as the slots allow."""
        while (short := np.flatnonzero(self._hosts < self._threshold)).size:
            expert = int(short[np.argmin(self._hosts[short])])
            if not self._add_host(expert):
                return

    def find_departed(self) -> IntArray:
        """Return the indices of the initial replicas that have left their slots."""
        return np.flatnonzero((self._expert != self._before) & (self._before != _FREE))

    def find_added(self, layer: int) -> Replicas:
        """Return the replicas that entered slots of this `layer`."""
        fresh = self._expert != self._before
        expert, worker = self._expert[fresh], self._worker[fresh]
        return Replicas(layer=np.full_like(expert, layer), expert=expert, worker=worker)

    def _add_host(self, expert: int) -> bool:
        """Place an expert on one more node with the fewest copies; return False if that is impossible.

        The expert takes a slot that can be spared, or the slot of another expert that moves on to such a slot. This is
        a shortest augmenting path, so the total number of copies is minimal.

        A slot costs one copy if the worker did not have the expert before. Leaving a slot that was only just taken
        saves one.
        """
        givers = self._find_givers()
        cost = np.full(self._hosts.size, _NEVER)
        cost[expert] = 0
        came_from: dict[int, tuple[int, int]] = {}  # expert -> (the expert it makes room for, the slot)
        queue, best = [(0, expert)], (_NEVER, expert, 0)
        while queue:
            so_far, mover = heapq.heappop(queue)
            if so_far > cost[mover]:
                continue
            open_nodes = self._counts[mover] == 0
            slot = self._find_spare_slot(mover, givers, open_nodes)
            if slot is not None:
                best = min(best, (so_far + int(self._is_new(mover, slot)), mover, slot))
                if best[0] <= self._least:
                    break
            slots = np.flatnonzero(open_nodes[self._node] & (self._expert != _FREE))
            others = self._expert[slots]
            price = so_far + self._is_new(mover, slots) - self._is_new(others, slots)
            # Keep only the cheapest slot of each expert.
            order = np.lexsort((price, others))
            order = order[np.r_[True, np.diff(others[order]) != 0]] if order.size else order
            for place in order[price[order] < cost[others[order]]].tolist():
                other = int(others[place])
                cost[other] = price[place]
                came_from[other] = mover, int(slots[place])
                heapq.heappush(queue, (int(price[place]), other))
        self._least, mover, slot = max(best[0], self._least), best[1], best[2]
        if best[0] == _NEVER:
            return False
        self._place(mover, slot)
        while mover != expert:
            mover, slot = came_from[mover]
            self._place(mover, slot)
        return True

    def _is_new(self, expert: int | IntArray, slot: int | IntArray) -> IntArray:
        """Return 1 if the slot's worker had no replica of the expert before, else 0."""
        return 1 - self._had[expert, self._worker[slot]].astype(np.int64)

    def _find_givers(self) -> list[int]:
        """Return the experts that can spare a slot, the one with the most surplus by its load first.

        Free slots come before all experts. An expert can spare a slot if it has more hosts than it needs, or several
        replicas on one node.
        """
        surplus = self._total - self._wanted
        can = (self._hosts > self._threshold) | (self._total > self._hosts)
        return [_FREE, *(int(expert) for expert in np.argsort(-surplus, kind="stable") if can[expert])]

    def _find_spare_slot(self, expert: int, givers: list[int], open_nodes: BoolArray) -> int | None:
        """Return the cheapest spare slot on one of the `open_nodes`, or None.

        If there are racks, a slot in a rack without the expert is preferred.
        """
        racks, found = self._racks, None
        taken = racks[np.flatnonzero(self._counts[expert])] if racks is not None else self._wanted[:0]
        for giver in givers:
            slots = np.flatnonzero(self._expert == giver)
            slots = slots[open_nodes[self._node[slots]]]
            double = self._counts[giver, self._node[slots]] > 1
            if giver != _FREE and self._hosts[giver] <= self._threshold:
                slots = slots[double]
            elif double.any():
                slots = slots[double]  # The giver keeps all its hosts.
            if racks is not None and slots.size:
                found = int(slots[0]) if found is None else found
                slots = slots[~np.isin(racks[self._node[slots]], taken)]
            if slots.size:
                return int(slots[0])
        return found

    def _place(self, expert: int, slot: int) -> None:
        """Place an expert in a slot in place of the expert that is there."""
        node, before = int(self._node[slot]), int(self._expert[slot])
        self._counts[before, node] -= 1
        if before != _FREE:
            self._hosts[before] -= not self._counts[before, node]
            self._total[before] -= 1
        self._hosts[expert] += not self._counts[expert, node]
        self._total[expert] += 1
        self._counts[expert, node] += 1
        self._expert[slot] = expert


# ---- the rest ----


def _fill_free_slots(kept: Replicas, wanted: IntArray, room: WorkerRoom) -> Replicas:
    """Return replicas for the free slots: of the experts that lack most by their loads.

    Slots are filled round by round over the nodes, so that an expert's new replicas are on different nodes.
    """
    (layers, experts), workers = wanted.shape, room.slots.size
    used = np.bincount(kept.layer * workers + kept.worker, minlength=layers * workers).reshape(layers, workers)
    free = room.slots[None, :] - used
    have = np.bincount(kept.layer * experts + kept.expert, minlength=layers * experts).reshape(layers, experts)
    extra = _share_slots(np.maximum(wanted - have, 0), free.sum(axis=1))
    places = np.repeat(indices(layers * workers), free.ravel())
    layer, worker = places // workers, places % workers
    home = layer * room.nodes + room.node[worker]
    by_home = np.argsort(home, kind="stable")
    # Number the free slots within each node and layer.
    turn = np.empty_like(home)
    starts = np.flatnonzero(np.r_[True, np.diff(home[by_home]) != 0]) if home.size else home
    turn[by_home] = indices(home.size) - np.repeat(starts, np.diff(np.r_[starts, home.size]))
    order = np.lexsort((room.node[worker], turn, layer))
    return Replicas(
        layer=layer[order], expert=np.repeat(indices(layers * experts), extra.ravel()) % experts, worker=worker[order]
    )


def _share_slots(lacking: IntArray, free: IntArray) -> IntArray:
    """Share exactly `free` `(L,)` slots among the experts in proportion to `lacking` `(L, E)`.

    No expert gets more than it lacks.
    """
    total = np.maximum(lacking.sum(axis=1), 1)
    exact = lacking * free[:, None]
    share = exact // total[:, None]
    remainder = exact - share * total[:, None]
    rank = np.argsort(np.argsort(-remainder, axis=1, kind="stable"), axis=1, kind="stable")
    return share + (rank < (free - share.sum(axis=1))[:, None])
