"""The effect of a trace's real distributions on a recommendation that assumes exponential ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.errors import BadInputError
from holdfast.planner.reliability.distributions import Distribution, Empirical, RateProfile, Scaled
from holdfast.planner.reliability.monte_carlo.estimate import Estimate, SimulationSettings, estimate, simulate_strategy
from holdfast.planner.reliability.sparing.block_mtbf import interruption_rate
from holdfast.planner.reliability.sparing.case import (
    Cluster,
    FailureModel,
    SparingCase,
    SparingStrategy,
    blocks_per_zone,
    group_blocks,
)
from holdfast.planner.reliability.sparing.evaluation import evaluate, strategy_gains
from holdfast.planner.reliability.traces.fit import HOURS_PER_WEEK, TraceFit, weekly_failures
from holdfast.planner.reliability.traces.interruptions import Interruptions
from holdfast.planner.reliability.traces.trace import FailureTrace

#: Largest relative difference between the interruptions by a fit and those in its trace.
MOST_DIFFERENCE = 0.05
#: The MTBF of parts without failures in the trace: far above any other, but finite.
NEVER_HOURS = 1e12


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Reality:
    """One set of distributions for simulations. None stands for exponential ones and a constant rate."""

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
    #: the interruptions of all observed nodes in the trace
    interruptions: Interruptions
    #: the interruptions that follow from the fit
    implied_interruptions: float
    realities: tuple[Reality, ...]
    strategies: tuple[StrategyUnderTrace, ...]
    #: spare blocks per zone -> goodput in the last reality, for the strategy `best_closed_form`
    other_spare_blocks: dict[int, Estimate]

    @property
    def best_closed_form(self) -> int:
        """Index of the strategy that the closed form recommends."""
        return _best([strategy.closed_form for strategy in self.strategies])

    def best_simulated(self, reality: int) -> int:
        """Return the index of the strategy with the highest mean goodput in one reality."""
        return _best([strategy.simulated[reality].mean for strategy in self.strategies])


def _best(goodputs: list[float]) -> int:
    return max(range(len(goodputs)), key=goodputs.__getitem__)


def realities(trace: FailureTrace, fit: TraceFit) -> tuple[Reality, ...]:
    """Return the exponential model, and three models that include more and more of the trace.

    A trace of few machines cannot show how its bursts appear in a large fleet, so two models assume different bursts.
    In one, gaps between failures are stretched to the fleet's rate: bursts keep their number of failures and get
    shorter. In the other, the rate follows the trace's weeks: bursts keep their length and grow with the fleet.
    """
    # The mean includes unfinished repairs, the shape only repairs that ended.
    repairs = Scaled(shape=Empirical(trace.repair_hours), mean=fit.mttr_hours.mean)
    weeks = RateProfile(HOURS_PER_WEEK, weekly_failures(trace))
    return (
        Reality(name="exponential"),
        Reality(name="real repairs", repairs=repairs),
        Reality(name="real repairs and gaps", repairs=repairs, failure_gaps=Empirical(trace.gap_hours)),
        Reality(name="real repairs and weeks", repairs=repairs, timeline=weeks),
    )


def fitted_failures(
    case: SparingCase, trace: FailureTrace, fit: TraceFit, interruptions: Interruptions, trays_per_node: float
) -> FailureModel:
    """Return the case's failure model with MTBF of trays and racks, and MTTR, fitted to a trace.

    A node of the trace stands for `trays_per_node` trays. Every interruption counts once, as a failure of a tray or of
    a rack. Without one of a kind, its MTBF is `NEVER_HOURS`.

    Raises:
        BadInputError: the interruptions that follow differ from those in the trace by more than 5 %.
    """
    nodes_per_rack = _nodes_per_rack(case.cluster, trays_per_node)
    up, racks = trace.node_hours_up, interruptions.racks
    failures = replace(
        case.failures,
        mtbf_tray_hours=up * trays_per_node / interruptions.nodes if interruptions.nodes else NEVER_HOURS,
        mtbf_rack_hours=up / nodes_per_rack / racks if racks else NEVER_HOURS,
        mttr_hours=fit.mttr_hours.mean,
    )
    implied = implied_interruptions(case.cluster, failures, up / nodes_per_rack)
    if not abs(implied / interruptions.total - 1.0) <= MOST_DIFFERENCE:
        raise BadInputError(
            f"the fit has {implied:,.0f} interruptions of the observed nodes, and the trace "
            f"{interruptions.total:,.0f}: they differ by more than 5 %, so the fit does not describe this trace; "
            "check --node-gpus and --rack-share"
        )
    return failures


def implied_interruptions(cluster: Cluster, failures: FailureModel, rack_hours: float) -> float:
    """Return the number of interruptions that the closed form expects in this many hours of racks in service."""
    per_hour = interruption_rate(
        mtbf_tray=failures.mtbf_tray_hours,
        mtbf_rack=failures.mtbf_rack_hours,
        working_trays=cluster.gpus_per_rack // cluster.gpus_per_tray,
    )
    return rack_hours * float(per_hour)


def consequence(
    case: SparingCase,
    trace: FailureTrace,
    fit: TraceFit,
    settings: SimulationSettings,
    *,
    trays_per_node: float,
    interruptions: Interruptions,
) -> TraceConsequence:
    """Return the goodput of the case's strategies with the trace's failures: by the closed form, and simulated.

    Each strategy is simulated under each of the `realities`. The best one by the closed form is also simulated with
    other numbers of spare blocks, under the last reality.

    Raises:
        BadInputError: see `fitted_failures`.
    """
    at_trace = replace(case, failures=fitted_failures(case, trace, fit, interruptions, trays_per_node))
    # With a heavy tail, the initial state has an effect until the longest repair is over.
    warmup = max(float(trace.repair_hours.max()), 10.0 * fit.mttr_hours.mean)
    settings = replace(settings, warmup_hours=warmup)
    compared = realities(trace, fit)
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
    return TraceConsequence(
        case=at_trace,
        interruptions=interruptions,
        implied_interruptions=implied_interruptions(
            case.cluster, at_trace.failures, trace.node_hours_up / _nodes_per_rack(case.cluster, trays_per_node)
        ),
        realities=compared,
        strategies=strategies,
        other_spare_blocks=others,
    )


def _nodes_per_rack(cluster: Cluster, trays_per_node: float) -> float:
    return cluster.gpus_per_rack / cluster.gpus_per_tray / trays_per_node


def _goodput(
    case: SparingCase, strategy: SparingStrategy, spare_blocks: int, settings: SimulationSettings, reality: Reality
) -> Estimate:
    """Simulate a strategy and return its goodput in GPUs: CETT times the cluster's GPUs times the hardware and model
    gains.

    The result has a confidence interval. `reality` replaces the case's distributions of repairs and gaps, and its
    constant rate of failures.
    """
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
    """Return up to four other numbers of spare blocks: one and two steps below and above `spare_blocks`.

    A step is 5 % of `spare_blocks` in whole placement groups, at least one group. Numbers below 0, or without a working
    block in a zone, are left out.
    """
    group = group_blocks(case.placement, strategy)
    step = group * max(1, round(0.05 * spare_blocks / group))
    candidates = [spare_blocks + i * step for i in (-2, -1, 1, 2)]
    return [spares for spares in candidates if 0 <= spares < blocks_per_zone(case.cluster, strategy)]
