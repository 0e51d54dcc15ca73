"""EPLB, DeepSeek's load balancer for expert parallelism, implemented from its description.

Groups of experts go to the nodes, heaviest group first, each to the least loaded node that has room. Within a node,
each further replica goes to the expert with the most load per replica. Then replicas go to the node's GPUs as groups go
to nodes. If the groups do not divide evenly among the nodes, all GPUs count as one node with one group.

EPLB considers neither failures nor the experts that nodes hold already. Two replicas of an expert may be on one GPU.

Axes: L layers, E experts, R replicas (slots), X rows that are packed together (layers, or nodes of layers).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.planning.arrays import FloatArray, IntArray, indices


@dataclass(frozen=True, kw_only=True, slots=True)
class EplbShape:
    """The cluster and the groups; `replicas` divide among `gpus`, `gpus` among `nodes`, experts among `groups`."""

    replicas: int
    groups: int
    nodes: int
    gpus: int

    @property
    def hierarchical(self) -> bool:
        """Whether whole groups go to nodes."""
        return self.groups % self.nodes == 0


def eplb(loads: FloatArray, shape: EplbShape) -> IntArray:
    """Return the expert in each slot `(L, R)` for `loads` `(L, E)`, as DeepSeek's EPLB places them.

    Slots are in the order of the nodes, and within a node in the order of its GPUs. If the groups do not divide evenly
    among the nodes, all GPUs count as one node.
    """
    layers, experts = loads.shape
    groups, nodes = (shape.groups, shape.nodes) if shape.hierarchical else (1, 1)
    size, per_node = experts // groups, experts // nodes
    slot_of_group = _pack(loads.reshape(layers, groups, size).sum(axis=2), nodes)
    # The experts in the order of the nodes, group by group as packed.
    group_at = _invert(slot_of_group)
    order = (group_at[:, :, None] * size + indices(size)).reshape(layers * nodes, per_node)
    rows = np.repeat(indices(layers), nodes)[:, None]
    tokens = loads[rows, order]
    expert = _replicate(tokens, shape.replicas // nodes)
    number = _count_replicas(expert, per_node)
    work = np.take_along_axis(tokens / number, expert, axis=1)
    in_slots = _invert(_pack(work, shape.gpus // nodes))
    chosen = np.take_along_axis(expert, in_slots, axis=1)
    return np.take_along_axis(order, chosen, axis=1).reshape(layers, shape.replicas)


def extra_replicas(tokens: FloatArray, replicas: IntArray, extra: int) -> IntArray:
    """Return the expert that gets each of `extra` further replicas, `(X, extra)`.

    It is always the expert with the most tokens per replica. `tokens` and the present `replicas` are `(X, E)`.
    """
    number = replicas.astype(np.float64)
    each = tokens / number
    row = indices(len(tokens))
    chosen = np.empty((len(tokens), extra), dtype=np.int64)
    for turn in range(extra):
        most = each.argmax(axis=1)
        chosen[:, turn] = most
        number[row, most] += 1.0
        each[row, most] = tokens[row, most] / number[row, most]
    return chosen


def _replicate(tokens: FloatArray, slots: int) -> IntArray:
    """Return the expert of each of the `slots`, `(X, slots)`: each expert once, then the further replicas."""
    once = np.broadcast_to(indices(tokens.shape[1]), tokens.shape)
    return np.concatenate((once, extra_replicas(tokens, np.ones_like(once), slots - tokens.shape[1])), axis=1)


def _pack(weight: FloatArray, packs: int) -> IntArray:
    """Return the position of each item of `weight` `(X, items)`, numbered pack by pack.

    Each of the `packs` gets the same number of items. The heaviest item goes first, to the lightest pack with room.
    With one item per pack, the items keep their order.
    """
    rows, items = weight.shape
    room = items // packs
    if room == 1:
        return np.broadcast_to(indices(items), weight.shape)
    order = np.argsort(-weight, axis=1, kind="stable")
    sorted_weight = np.take_along_axis(weight, order, axis=1)
    load = np.zeros((rows, packs))
    held = np.zeros((rows, packs), dtype=np.int64)
    place = np.empty((rows, items), dtype=np.int64)
    row = indices(rows)
    for turn in range(items):
        pack = load.argmin(axis=1)
        number = held[row, pack]
        place[row, order[:, turn]] = pack * room + number
        held[row, pack] = number + 1
        load[row, pack] = np.where(number + 1 == room, np.inf, load[row, pack] + sorted_weight[:, turn])
    return place


def _invert(places: IntArray) -> IntArray:
    """Return the item at each position `(X, items)`, from the position of each item."""
    inverse = np.empty_like(places)
    np.put_along_axis(inverse, places, np.broadcast_to(indices(places.shape[1]), places.shape), axis=1)
    return inverse


def _count_replicas(chosen: IntArray, experts: int) -> IntArray:
    """Return how often each of the `experts` is among the `chosen` `(X, slots)`, as `(X, E)`."""
    rows = len(chosen)
    cells = (indices(rows)[:, None] * experts + chosen).ravel()
    return np.bincount(cells, minlength=rows * experts).reshape(rows, experts)
