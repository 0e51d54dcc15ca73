"""What a trace's real distributions do to a recommendation that assumes exponential ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.reliability.arrays import as_floats
from holdfast.reliability.distributions import Distribution, Empirical, RateProfile
from holdfast.reliability.monte_carlo.estimate import Estimate, SimulationSettings, estimate, simulate_strategy
from holdfast.reliability.sparing.case import (
    SparingCase,
    SparingStrategy,
    blocks_per_zone,
    group_blocks,
    scaled_failures,
)
from holdfast.reliability.sparing.evaluation import evaluate, strategy_gains
from holdfast.reliability.traces.fit import HOURS_PER_WEEK, TraceFit, weekly_failures
from holdfast.reliability.traces.trace import FailureTrace


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Reality:
    """One set of distributions to simulate with; exponential and steady where None."""

    name: str
    repairs: Distribution | None = None
    failure_gaps: Distribution | None = None
    timeline: RateProfile | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyUnderTrace:
    """Goodput in GPUs of one strategy with the trace's means; `simulated` has one estimate per reality."""

    strategy: SparingStrategy
    spare_blocks: int
    closed_form: float
    simulated: tuple[Estimate, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceConsequence:
    """All strategies under all realities, and other spare counts for the recommended one."""

    case: SparingCase
    realities: tuple[Reality, ...]
    strategies: tuple[StrategyUnderTrace, ...]
    #: spare blocks per zone -> goodput in the last reality, for the strategy `best_closed_form`
    other_spare_blocks: dict[int, Estimate]

    @property
    def best_closed_form(self) -> int:
        """Index of the strategy that the closed form recommends."""
        return _best([strategy.closed_form for strategy in self.strategies])

    def best_simulated(self, reality: int) -> int:
        """Index of the strategy with most goodput on average in one reality."""
        return _best([strategy.simulated[reality].mean for strategy in self.strategies])


def _best(goodputs: list[float]) -> int:
    return max(range(len(goodputs)), key=goodputs.__getitem__)


def realities(trace: FailureTrace) -> tuple[Reality, ...]:
    """Return the exponential model, and three with ever more of what the trace shows.

    A trace of few machines can't say how its bursts look in a large fleet, so there are two readings of them: gaps
    between failures stretched to the fleet's rate (bursts keep their number of failures and get shorter), and a rate
    that follows the trace's weeks (bursts keep their length and grow with the fleet).
    """
    repairs = Empirical(trace.repair_hours)
    weeks = RateProfile(HOURS_PER_WEEK, weekly_failures(trace))
    return (
        Reality(name="exponential"),
        Reality(name="real repairs", repairs=repairs),
        Reality(name="real repairs and gaps", repairs=repairs, failure_gaps=Empirical(trace.gap_hours)),
        Reality(name="real repairs and weeks", repairs=repairs, timeline=weeks),
    )


def consequence(
    case: SparingCase, trace: FailureTrace, fit: TraceFit, settings: SimulationSettings, *, trays_per_node: float
) -> TraceConsequence:
    """Return the goodput of the case's strategies with the trace's failures.

    A node of the trace stands for `trays_per_node` trays. Its failures are those of its trays and of its rack, for a
    rack takes all its nodes along: both together fail as often as the trace says, and the rack MTBF keeps its ratio to
    the tray's.
    """
    racks_per_tray = as_floats(case.failures.mtbf_tray_hours) / as_floats(case.failures.mtbf_rack_hours)
    mtbf = fit.mtbf_hours.mean * (trays_per_node + racks_per_tray)
    at_trace = replace(case, failures=scaled_failures(case.failures, mtbf, fit.mttr_hours.mean))
    # A heavy tail forgets that all began whole only once the longest repair is over.
    warmup = max(float(trace.repair_hours.max()), 10.0 * fit.mttr_hours.mean)
    settings = replace(settings, warmup_hours=warmup)
    compared = realities(trace)
    strategies = tuple(
        StrategyUnderTrace(
            strategy=outcome.strategy,
            spare_blocks=int(outcome.spare_blocks),
            closed_form=float(outcome.goodput_gpus),
            simulated=tuple(
                _goodput(at_trace, outcome.strategy, int(outcome.spare_blocks), settings, reality)
                for reality in compared
            ),
        )
        for outcome in evaluate(at_trace).strategies
    )
    best = strategies[_best([strategy.closed_form for strategy in strategies])]
    others = {
        spares: _goodput(at_trace, best.strategy, spares, settings, compared[-1])
        for spares in _neighbours(at_trace, best.strategy, best.spare_blocks)
    }
    return TraceConsequence(case=at_trace, realities=compared, strategies=strategies, other_spare_blocks=others)


def _goodput(
    case: SparingCase, strategy: SparingStrategy, spare_blocks: int, settings: SimulationSettings, reality: Reality
) -> Estimate:
    simulated = simulate_strategy(
        case,
        strategy,
        spare_blocks,
        settings,
        repairs=reality.repairs,
        failure_gaps=reality.failure_gaps,
        timeline=reality.timeline,
    )
    hardware, model = strategy_gains(case, strategy)
    return estimate(simulated.cett * (case.cluster.gpus * hardware * model))


def _neighbours(case: SparingCase, strategy: SparingStrategy, spare_blocks: int) -> list[int]:
    """Return the spare counts that lie up to two placement groups (or 5 % of the spares) away."""
    group = group_blocks(case.placement, strategy)
    step = group * max(1, round(0.05 * spare_blocks / group))
    candidates = [spare_blocks + i * step for i in (-2, -1, 1, 2)]
    return [spares for spares in candidates if 0 <= spares < blocks_per_zone(case.cluster, strategy)]
