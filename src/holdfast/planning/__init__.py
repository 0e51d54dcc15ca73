"""Expert placement, token dispatch and node division: pure functions of numpy arrays.

`make_plan` computes placements. It allocates replicas to experts by their loads and places them on nodes by a strategy.
Then it maps the result to the nodes so that few experts move. A job calls, in this order:

1. `make_plan`: from loads and slots to a `Plan`, or to a `Shortage` if there are more experts than slots.
2. `plan_transfers`: which node sends which expert to which node.
3. `decide_rebalance`: whether these moves are worth their cost.
4. `dispatch_schedule`: in each step, which rank computes which tokens.

Example, with 1 layer, 4 experts and 3 nodes of 4 slots:

    loads = np.array([[10, 20, 30, 40]])
    plan = make_plan(loads, np.full(3, 4), fault_threshold=2, strategy=strategy_named("best"))
    plan.counts  # (L, E, N): replicas of each expert on each node

`waf` divides the nodes of a pool among its jobs. `survival` computes the probability that a placement survives.
"""

from holdfast.planning.dispatch.interval import Interval as Interval
from holdfast.planning.dispatch.interval import NodeInterval as NodeInterval
from holdfast.planning.dispatch.minmax import MinMax as MinMax
from holdfast.planning.dispatch.minmax import minmax_capacities as minmax_capacities
from holdfast.planning.dispatch.proportional import Proportional as Proportional
from holdfast.planning.dispatch.schedule import DispatchSchedule as DispatchSchedule
from holdfast.planning.dispatch.schedule import DispatchScheme as DispatchScheme
from holdfast.planning.dispatch.schedule import dispatch_schedule as dispatch_schedule
from holdfast.planning.dispatch.schedule import replica_capacities as replica_capacities
from holdfast.planning.dispatch.schemes import scheme_named as scheme_named
from holdfast.planning.dispatch.schemes import schemes as schemes
from holdfast.planning.moving.migration import Migration as Migration
from holdfast.planning.moving.migration import assign_roles as assign_roles
from holdfast.planning.moving.migration import plan_migration as plan_migration
from holdfast.planning.moving.transfers import Transfers as Transfers
from holdfast.planning.moving.transfers import plan_transfers as plan_transfers
from holdfast.planning.moving.workers import split_over_workers as split_over_workers
from holdfast.planning.placement.allocation import Allocation as Allocation
from holdfast.planning.placement.allocation import Guarantee as Guarantee
from holdfast.planning.placement.allocation import Shortage as Shortage
from holdfast.planning.placement.allocation import allocate as allocate
from holdfast.planning.placement.allocation import as_slots as as_slots
from holdfast.planning.placement.strategy import PlacementProblem as PlacementProblem
from holdfast.planning.placement.strategy import Strategy as Strategy
from holdfast.planning.placement.strategy import fewest_hosts as fewest_hosts
from holdfast.planning.placement.strategy import from_node_lists as from_node_lists
from holdfast.planning.placement.strategy import node_lists as node_lists
from holdfast.planning.plan import Plan as Plan
from holdfast.planning.plan import make_plan as make_plan
from holdfast.planning.plan import strategies as strategies
from holdfast.planning.plan import strategy_named as strategy_named
from holdfast.planning.rebalancing import CostModel as CostModel
from holdfast.planning.rebalancing import LoadAverage as LoadAverage
from holdfast.planning.rebalancing import RebalanceDecision as RebalanceDecision
from holdfast.planning.rebalancing import decide_rebalance as decide_rebalance
from holdfast.planning.rebalancing import migration_seconds as migration_seconds
from holdfast.planning.survival.objective import as_weights as as_weights
from holdfast.planning.survival.objective import default_weights as default_weights
from holdfast.planning.survival.recovery_probability import RecoveryCurve as RecoveryCurve
from holdfast.planning.survival.recovery_probability import rack_curve as rack_curve
from holdfast.planning.survival.recovery_probability import recovery_curve as recovery_curve
