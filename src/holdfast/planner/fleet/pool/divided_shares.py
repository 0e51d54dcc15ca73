"""Nodes allocated by the pool's policy (`share.dividing`) without its state machine, for thousands of nodes.

Each change has the same result as the machine's, node by node (`tests/planner/fleet/pool`). The machine's time for its
record and its messages is saved. The simulation can also start with given nodes in each job, as in a recorded pool.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf

from holdfast.coordination.pool.granting import GUESSED_CHANGE_S, RESTART_S, SAVED_S
from holdfast.coordination.pool.node_selection.choosing import select_nodes, select_surplus
from holdfast.coordination.pool.plans.deciding import KNOWN_RATE
from holdfast.coordination.pool.plans.paces import round_up_nodes
from holdfast.coordination.pool.share.achieving import Waf
from holdfast.coordination.pool.share.dividing import divide
from holdfast.coordination.pool.share.interface import Bid, Demand
from holdfast.coordination.pool.share.policies import POLICIES
from holdfast.planner.fleet.pool.machine_shares import BEGIN
from holdfast.planner.fleet.pool.tasks import FleetTask
from holdfast.planning.waf.durations import observed_rate
from holdfast.planning.waf.survival import lost_with_all
from holdfast.protocol.pool.record import PoolNode


class DividedShares:
    """The owner of each node, by a policy alone."""

    def __init__(
        self,
        policy: str,
        jobs: Sequence[FleetTask],
        nodes: Sequence[str],
        change_s: Callable[[int], float],
        *,
        first: Mapping[str, str] | None = None,
    ) -> None:
        """Start with all nodes up and all jobs submitted, and make the first plan.

        Args:
            change_s: returns the seconds that a planned change costs a job of this many nodes.
            first: the job of each node, if a plan was made before. The first plan is then not made.
        """
        # The next best plan, which is only for display, takes longer to find than the plan.
        self._policy = Waf(next_best=False) if policy == Waf.name else POLICIES[policy]
        self._jobs = {task.name: task for task in jobs}
        self._change_s = change_s
        self._nodes = {node: PoolNode(name=node, session="") for node in nodes}
        self._owner: dict[str, str] = {}
        self._mine: dict[str, set[str]] = {task.name: set() for task in jobs}
        self._shares = dict.fromkeys(self._mine, 0)
        self._free = set(nodes)
        self._failures, self._begun = 0, first is not None
        for node, job in (first or {}).items():
            self._free.discard(node)
            self._owner[node] = job
            self._mine[job].add(node)
            self._shares[job] += 1
        if not self._begun:
            self._apply_plan(0.0)
        self._begun = True

    def owner_of(self, node: str) -> str | None:
        """Return the job that trains on a node, or None."""
        return self._owner.get(node)

    def size_of(self, job: str) -> int:
        """Return how many nodes a job trains on."""
        return len(self._mine[job])

    def remove_node(self, node: str, now: float) -> frozenset[str]:
        """Remove a node whose loss was noticed, count the failure if a job had it, and divide the nodes again.

        Return the jobs whose nodes changed, and always the job that had the node.
        """
        self._free.discard(node)
        job = self._owner.pop(node, None)
        if job is None:
            return self._apply_plan(now)
        self._mine[job].discard(node)
        self._failures += 1
        return self._apply_plan(now) | {job}

    def add_node(self, node: str, now: float) -> frozenset[str]:
        """Add a new or returned node as free, and divide again. Return the jobs whose nodes changed."""
        self._nodes.setdefault(node, PoolNode(name=node, session=""))
        self._free.add(node)
        return self._apply_plan(now)

    # ---- inside ----

    def _apply_plan(self, now: float) -> frozenset[str]:
        """Divide all nodes by the policy, with the failure rate observed so far, and move them between jobs.

        Free nodes are given first, then nodes from jobs above their share. Return the jobs whose nodes changed.
        """
        total = len(self._free) + len(self._owner)
        seen_s = (BEGIN + now - BEGIN) * len(self._nodes)  # Round as the machine's clock does.
        rate = observed_rate(self._failures, seen_s, known_rate=KNOWN_RATE, known_s=1 / KNOWN_RATE)
        bids = tuple(self._make_bid(order, task, total, rate) for order, task in enumerate(self._jobs.values(), 1))
        division = divide(self._policy, Demand(nodes=total, bids=bids, now=now, failure_rate=rate))
        self._shares = {name: division.nodes[name] for name in self._jobs}
        before = {name: set(mine) for name, mine in self._mine.items()}
        leaving = {
            name: select_surplus(self._nodes, mine, self._nodes, len(mine) - self._shares[name])
            for name, mine in self._mine.items()
            if len(mine) > self._shares[name]
        }
        self._grant_nodes()
        for name, nodes in leaving.items():
            for node in nodes:
                self._mine[name].discard(node)
                del self._owner[node]
            self._free.update(nodes)
            self._grant_nodes()
        return frozenset(name for name, mine in self._mine.items() if mine != before[name])

    def _grant_nodes(self) -> None:
        """Give free nodes to jobs below their share.

        Jobs below their minimum come first, then the others, each in the order of submission.
        """
        short = [name for name, mine in self._mine.items() if len(mine) < self._shares[name]]
        for name in sorted(short, key=lambda name: len(self._mine[name]) >= self._jobs[name].least):
            mine = self._mine[name]
            for node in select_nodes(self._nodes, mine, self._free, self._shares[name] - len(mine)):
                self._free.discard(node)
                mine.add(node)
                self._owner[node] = name

    def _make_bid(self, order: int, task: FleetTask, total: int, rate: float) -> Bid:
        """Return a task's bid for nodes. `total` is the number of nodes in the pool, `rate` is their failure rate.

        If the policy uses throughput, the bid includes what each size achieves and the share of time lost to failures.
        Before the first division, it holds a guessed time for a change of size.
        """
        has = len(self._mine[task.name])
        change_s = self._change_s(has) if self._begun else GUESSED_CHANGE_S
        lost_s = RESTART_S + SAVED_S / 2
        reckons = self._policy.uses_throughput
        lost_share = lost_with_all(round_up_nodes(total), rate, change_s, lost_s).tolist() if reckons else ()
        return Bid(
            name=task.name,
            order=order,
            least=task.least,
            most=task.largest,
            sizes=task.sizes,
            weight=task.weight,
            has=has,
            admitted=self._begun,
            limit_s=inf,
            had=self._shares[task.name],
            achieves=task.achieves if reckons else (),
            in_flop=True,
            change_s=change_s,
            hit_s=change_s,
            lost_share=tuple(lost_share),
        )
