"""Comparison of simulation and closed form, under the closed form's assumptions and under more realistic ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.planner.reliability.distributions import Exponential, RepairMix
from holdfast.planner.reliability.monte_carlo.estimate import (
    Estimate,
    SimulatedStrategy,
    SimulationSettings,
    estimate,
    simulate_strategy,
    synchronous_checkpoint,
)
from holdfast.planner.reliability.sparing.case import FailureModel, SparingCase, SparingStrategy
from holdfast.planner.reliability.sparing.evaluation import StrategyGoodput, evaluate_strategy
from holdfast.planner.reliability.sparing.recovery import RackFailures, Synchronous
from holdfast.planning.checkpointing import FailureClock
from holdfast.planning.special import as_floats


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The closed form and the simulation of one sparing strategy under one set of assumptions."""

    assumptions: str
    strategy: SparingStrategy
    spare_blocks: int
    closed_form: float
    cett: Estimate
    beta: Estimate
    gamma: Estimate

    @property
    def gap(self) -> float:
        """Simulated CETT relative to the closed form, less 1."""
        return self.cett.mean / self.closed_form - 1.0 if self.closed_form > 0 else 0.0


def compare(case: SparingCase, settings: SimulationSettings) -> list[Comparison]:
    """Return a comparison with the closed form for every strategy and set of assumptions.

    The closed form is always the paper's: frozen clock, each block charged its rack's failures. The simulations first
    assume the same. Then they let failures strike during saving, detection and restart (clock running), let the blocks
    of a rack fail together (racks once), and both.
    """
    case = with_assumptions(case, FailureClock.FROZEN, RackFailures.PER_BLOCK)
    modes = (
        ("as the closed form", FailureClock.FROZEN, RackFailures.PER_BLOCK),
        ("clock running", FailureClock.RUNNING, RackFailures.PER_BLOCK),
        ("racks once", FailureClock.FROZEN, RackFailures.PER_RACK),
        ("both", FailureClock.RUNNING, RackFailures.PER_RACK),
    )
    comparisons: list[Comparison] = []
    for strategy in case.strategies:
        closed = evaluate_strategy(case, strategy)
        for name, clock, racks in modes:
            simulated = simulate_strategy(
                with_assumptions(case, clock, racks), strategy, int(closed.spare_blocks), settings
            )
            comparisons.append(_comparison(name, closed, simulated))
    return comparisons


def compare_repair_mixes(
    case: SparingCase,
    strategy: SparingStrategy,
    settings: SimulationSettings,
    *,
    epsilons: tuple[float, ...],
    mttr_auto_hours: float,
    mttr_ticket_hours: float,
) -> list[Comparison]:
    """Return a comparison for each epsilon of a simulation with two repair processes with the closed form.

    The closed form uses their mean. This is the paper's Figure 6: MTTR = epsilon MTTR_auto + (1 - epsilon) MTTR_ticket.
    """
    comparisons: list[Comparison] = []
    for epsilon in epsilons:
        mix = RepairMix(epsilon=epsilon, auto=Exponential(mttr_auto_hours), ticket=Exponential(mttr_ticket_hours))
        mixed = replace(case, failures=replace(case.failures, mttr_hours=mix.mean))
        closed = evaluate_strategy(mixed, strategy)
        simulated = simulate_strategy(mixed, strategy, int(closed.spare_blocks), settings, repairs=mix)
        comparisons.append(_comparison(f"two repairs, epsilon {epsilon:g}", closed, simulated))
    return comparisons


def with_assumptions(case: SparingCase, clock: FailureClock, rack_failures: RackFailures) -> SparingCase:
    """Return a copy of a synchronous case with this failure clock and this way to count rack failures.

    Raises:
        BadInputError: the case has another recovery scheme.
    """
    failures: FailureModel = replace(case.failures, rack_failures=rack_failures)
    checkpoint = replace(synchronous_checkpoint(case), clock=clock)
    return replace(case, failures=failures, recovery=Synchronous(checkpoint=checkpoint))


def _comparison(assumptions: str, closed: StrategyGoodput, simulated: SimulatedStrategy) -> Comparison:
    """Return a closed form next to the simulation's means, with confidence intervals, of CETT, beta and gamma."""
    return Comparison(
        assumptions=assumptions,
        strategy=closed.strategy,
        spare_blocks=int(closed.spare_blocks),
        closed_form=float(as_floats(closed.cett)),
        cett=estimate(simulated.cett),
        beta=estimate(simulated.beta),
        gamma=estimate(simulated.gamma),
    )
