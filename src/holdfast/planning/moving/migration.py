"""From one placement to the next: which node takes which role, and which experts move (Lazarus, 4.3).

Axes: L layers, E experts, N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.planning.arrays import BoolArray, FloatArray, IntArray, indices
from holdfast.planning.moving.transfers import Transfers, plan_transfers
from holdfast.planning.solvers import best_assignment

#: Up to this many nodes the optimal assignment takes less than 50 ms on one core (measured in benchmarks/planning.py).
#: With more nodes, each chooses greedily, as in the paper.
OPTIMAL_UP_TO_NODES = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Migration:
    """The change from the replicas that nodes hold to a placement."""

    #: `(L, E, N)` replicas per node, with the roles mapped to nodes.
    counts: IntArray
    #: `(N,)` the role (node index of the planned placement) of each node.
    roles: IntArray
    transfers: Transfers
    #: The (layer, expert) pairs without any live copy, which no transfer can restore.
    lost: tuple[tuple[int, int], ...]

    @property
    def expert_moves(self) -> int:
        """How many copies of experts are sent; replicas of one expert on one node share one copy."""
        return len(self.transfers)


def plan_migration(
    held: IntArray, planned: IntArray, *, kinds: IntArray | None = None, mapped: bool = False
) -> Migration:
    """Map the `planned` roles to the nodes so that the fewest experts move, and plan the transfers.

    Args:
        held: `(L, E, N)` replicas that each node holds now, 0 for joining nodes. Lost nodes have no column.
        planned: `(L, E, N)` replicas of each role.
        kinds: `(N,)`; a role may only go to a node of the same kind (slots, racks) as the node at the role's own index.
            None if all nodes are alike.
        mapped: The roles are already assigned: role i belongs to node i.
    """
    have, want = held > 0, planned > 0
    roles = indices(held.shape[2]) if mapped else assign_roles(have, want, kinds=kinds)
    counts = planned
    if (roles != indices(roles.size)).any():
        # Unlike indexing, `take` returns a C-contiguous array.
        counts, want = np.take(planned, roles, axis=2), np.take(want, roles, axis=2)
    transfers, lost = plan_transfers(have, want)
    return Migration(counts=counts, roles=roles, transfers=transfers, lost=lost)


def assign_roles(
    held: IntArray | BoolArray, planned: IntArray | BoolArray, *, kinds: IntArray | None = None
) -> IntArray:
    """Return each node's role `(N,)` in the assignment that moves the fewest experts (ERRATA, Lazarus 7).

    The assignment is optimal up to `OPTIMAL_UP_TO_NODES` nodes, and greedy beyond. Among equal roles, a node keeps its
    own index. Arguments are as for `plan_migration`; booleans that say which nodes hold an expert are enough.
    """
    kept = _kept_copies(held, planned)
    if kinds is not None:
        kept[kinds[:, None] != kinds[None, :]] = -float(planned.size)
    # Among equal roles, a node keeps its own index. So an unchanged plan moves nothing and stays readable.
    kept = kept * (kept.shape[0] + 1) + np.eye(kept.shape[0])
    if kept.shape[0] <= OPTIMAL_UP_TO_NODES:
        return best_assignment(kept)
    return greedy_roles(kept)


def _kept_copies(held: IntArray | BoolArray, planned: IntArray | BoolArray) -> FloatArray:
    """Return how many of a role's experts each node already holds, `(N nodes, N roles)`."""
    have, want = (table.astype(np.bool_, copy=False).reshape(-1, table.shape[2]) for table in (held, planned))
    # Sums of 0 and 1 are exact in float32 up to 2**24 experts over all layers.
    return (have.astype(np.float32).T @ want.astype(np.float32)).astype(np.float64)


def greedy_roles(kept: FloatArray) -> IntArray:
    """Return each node's role `(N,)`, chosen greedily (Lazarus, 4.3).

    `kept` `(N nodes, N roles)` is how many experts a node keeps in a role. The node with the most to keep chooses
    first. Each node takes the free role that keeps the most.
    """
    roles = np.empty(kept.shape[0], dtype=np.int64)
    left = kept.copy()
    for node in np.argsort(-kept.max(axis=1), kind="stable"):
        role = int(left[node].argmax())
        roles[node] = role
        left[:, role] = -np.inf
    return roles


def node_kinds(slots: IntArray, racks: IntArray | None) -> IntArray:
    """Return the kind of each node `(N,)`, as a number; nodes of one kind (same slots and rack) may swap roles.

    `slots` and `racks` are `(N,)`. With `racks` None, only the slots count.
    """
    rack = np.zeros_like(slots) if racks is None else racks
    return np.unique(np.stack([slots, rack], axis=1), axis=0, return_inverse=True)[1].reshape(-1)
