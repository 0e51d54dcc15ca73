"""Simulations of several systems on one trace, and the throughput that would be achieved without failures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from holdfast.planner.fleet.pool.divided_shares import DividedShares
from holdfast.planner.fleet.pool.machine_shares import MachineShares
from holdfast.planner.fleet.pool.outages import FleetTrace
from holdfast.planner.fleet.pool.shares import HitShares, NodeShares
from holdfast.planner.fleet.pool.systems import OWN, System
from holdfast.planner.fleet.pool.tasks import FleetTask, check_capacity
from holdfast.planner.fleet.pool.trace_run import PoolResult, PoolSimulation
from holdfast.planning.waf.plan import best_plan
from holdfast.planning.waf.task import Task

#: With more nodes than this, the pool's policy allocates them without its state machine, unless `machine` is given.
MACHINE_NODES = 1024


def simulate_pool(
    system: System, tasks: Sequence[FleetTask], trace: FleetTrace, *, machine: bool | None = None
) -> PoolResult:
    """Simulate jobs on a trace under one system.

    Args:
        machine: whether the pool's state machine allocates nodes, or its policy alone, which has the same result. None:
            the machine, for up to `MACHINE_NODES` nodes.

    Raises:
        BadInputError: there are too few nodes for the jobs, no job is given, or two have the same name.
    """
    check_capacity(tasks, len(trace.nodes))
    by_machine = len(trace.nodes) <= MACHINE_NODES if machine is None else machine
    return PoolSimulation(system, trace, make_node_shares(system, tasks, trace.nodes, machine=by_machine), tasks).run()


def make_node_shares(system: System, tasks: Sequence[FleetTask], nodes: Sequence[str], *, machine: bool) -> NodeShares:
    """Return the initial allocation of nodes: the system's policy, run by the pool's state machine or alone.

    Systems that do not plan start with the plan of `waf` (section 7.5), and replace lost nodes by idle nodes and
    spares.
    """
    made = MachineShares if machine else DividedShares
    if system.shares == "pool":
        return made(system.policy, tasks, nodes, system.times.change_s)
    planned = made("waf", tasks, nodes, OWN.change_s)
    first = {node: job for node in nodes if (job := planned.owner_of(node)) is not None}
    idle = [node for node in nodes if node not in first]
    return HitShares(tasks, first, [*idle, *(f"spare-{number}" for number in range(1, system.spares + 1))])


def best_waf_without_failures(tasks: Sequence[FleetTask], nodes: int) -> float:
    """Return the most weighted achieved FLOP/s that any division of this many nodes reaches without failures."""
    planned = [
        Task(
            name=task.name,
            throughput=np.array(task.achieves),
            weight=task.weight,
            least=task.least,
            most=task.largest,
            sizes=task.sizes,
            floor=task.least,
        )
        for task in tasks
    ]
    return best_plan(planned, nodes, 1.0, next_best=False).waf
