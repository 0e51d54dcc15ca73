"""Systems side by side on one trace; and what would be achieved if nothing ever failed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from holdfast.planner.fleet.pool.divided_shares import DividedShares
from holdfast.planner.fleet.pool.machine_shares import MachineShares
from holdfast.planner.fleet.pool.months import Lived, Months
from holdfast.planner.fleet.pool.outages import FleetTrace
from holdfast.planner.fleet.pool.shares import HitShares, NodeShares
from holdfast.planner.fleet.pool.systems import OWN, System
from holdfast.planner.fleet.pool.tasks import FleetTask, check_room
from holdfast.planning.waf.plan import best
from holdfast.planning.waf.task import Task

#: with more nodes than these the pool's policy shares them out without its machine, unless that is asked for
MACHINE_NODES = 1024


def live(system: System, tasks: Sequence[FleetTask], trace: FleetTrace, *, machine: bool | None = None) -> Lived:
    """Let jobs live through a trace.

    Args:
        machine: whether the pool's own machine shares nodes out, or its policy alone, which comes to the same; None:
            up to `MACHINE_NODES` nodes.

    Raises:
        BadInputError: there are too few nodes for the jobs.
    """
    check_room(tasks, len(trace.nodes))
    by_machine = len(trace.nodes) <= MACHINE_NODES if machine is None else machine
    return Months(system, trace, shares_of(system, tasks, trace.nodes, machine=by_machine), tasks).run()


def shares_of(system: System, tasks: Sequence[FleetTask], nodes: Sequence[str], *, machine: bool) -> NodeShares:
    """Return who has which nodes at first; where nothing is planned, by the plan of `waf` (section 7.5)."""
    made = MachineShares if machine else DividedShares
    if system.shares == "pool":
        return made(system.policy, tasks, nodes, system.times.change_s)
    planned = made("waf", tasks, nodes, OWN.change_s)
    first = {node: job for node in nodes if (job := planned.owner(node)) is not None}
    idle = [node for node in nodes if node not in first]
    return HitShares(tasks, first, [*idle, *(f"spare-{number}" for number in range(1, system.spares + 1))])


def undisturbed(tasks: Sequence[FleetTask], nodes: int) -> float:
    """Return the most weighted achieved FLOP/s that any division of so many nodes makes, as long as nothing fails."""
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
    return best(planned, nodes, 1.0, next_best=False).waf
