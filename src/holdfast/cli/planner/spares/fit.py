"""`holdfast spares fit`."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.output import AsJson, print_json, print_line, warn
from holdfast.cli.planner.spares.report import estimate_json, table
from holdfast.cli.planner.spares.toml import read_case
from holdfast.cli.planner.spares.trace import MAP_KEYS, read_trace
from holdfast.errors import BadInputError
from holdfast.planner.reliability.monte_carlo.estimate import Estimate, SimulationSettings
from holdfast.planner.reliability.sparing.reference import catalina
from holdfast.planner.reliability.traces.consequence import NEVER_HOURS, TraceConsequence, consequence
from holdfast.planner.reliability.traces.fit import ShapeFit, TraceFit, fit_trace
from holdfast.planner.reliability.traces.interruptions import Interruptions, RackEvidence, count_interruptions
from holdfast.planner.reliability.traces.trace import FailureTrace
from holdfast.planning.special import Floats, as_floats


def fit(
    trace: Annotated[Path, typer.Argument(metavar="TRACE.csv", help="Failures and repairs; may be gzipped (.gz).")],
    cluster: Annotated[
        Path | None,
        typer.Option(metavar="CLUSTER.toml", help="Cluster and strategies (default: the paper's)."),
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="Nodes observed, including nodes that never failed.")] = None,
    hours: Annotated[float | None, typer.Option(help="Observed hours; up to the last event by default.")] = None,
    system: Annotated[int | None, typer.Option(help="Which system of a file that holds several.")] = None,
    node_gpus: Annotated[
        int | None, typer.Option(help="GPUs of a node (default: one tray). Its failures are spread over its trays.")
    ] = None,
    rack_share: Annotated[
        float | None,
        typer.Option(metavar="X", help="Share of failures of a whole rack, 0 to 1."),
    ] = None,
    columns: Annotated[
        list[str] | None,
        typer.Option("--map", metavar="KEY=COLUMN", help=f"The column of a key: {', '.join(MAP_KEYS)}. Repeatable."),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option("--from", metavar="DATE", help="Start of the observation: a date or seconds."),
    ] = None,
    merge_overlaps: Annotated[
        bool, typer.Option("--merge-overlaps", help="Sort, and join overlapping outages of a node.")
    ] = False,
    replications: Annotated[int, typer.Option(help="Simulated years per strategy and row.")] = 10,
    seed: Annotated[int, typer.Option(help="The same seed gives the same numbers.")] = 0,
    as_json: AsJson = False,
    plot: Annotated[Path | None, typer.Option(metavar="DIR", help="Also draw the distributions into DIR.")] = None,
) -> None:
    """Fit MTBF and MTTR to a trace of failures.

    TRACE.csv has one of these sets of columns: start_s,end_s,node (one line per failure; needs --nodes);
    seconds,event,node (event add or remove, one line per change);
    start_s_since_1996,system,node,system_nodes,repair_min (needs --system). Times are seconds or ISO dates. An empty
    end means that the repair has not ended.

    A failure of a node counts as the failure of one of its trays, unless the log shows that a whole rack failed: nodes
    with the same value in the column rack, or any nodes, failed at the same time, or a column mapped as scope contains
    "rack". --rack-share sets the share of such failures.

    Real failures come in bursts, and real repairs have heavy tails. Therefore each strategy is also simulated with the
    trace's own repairs and bursts, with the spares that the closed form recommends at the fitted MTBF and MTTR.
    """
    if rack_share is not None and not 0.0 <= rack_share <= 1.0:
        raise BadInputError(f"--rack-share = {rack_share:g}: must lie between 0 and 1")
    record = read_trace(
        trace,
        nodes=nodes,
        hours=hours,
        system=system,
        merge_overlaps=merge_overlaps,
        columns=tuple(columns or ()),
        since=since,
    )
    case = catalina() if cluster is None else read_case(cluster).case
    if node_gpus is not None and node_gpus < 1:
        raise BadInputError(f"--node-gpus = {node_gpus}: must be 1 or more")
    if node_gpus is not None and node_gpus > case.cluster.gpus_per_rack:
        raise BadInputError(
            f"--node-gpus = {node_gpus}: a rack of this cluster has {case.cluster.gpus_per_rack} GPUs; "
            "describe yours with --cluster CLUSTER.toml"
        )
    trays = 1.0 if node_gpus is None else node_gpus / case.cluster.gpus_per_tray
    settings = SimulationSettings(replications=replications, seed=seed)
    fitted = fit_trace(record, seed=seed)
    if not as_json:
        print_line(_fit_text(fitted, record))
    interruptions = count_interruptions(record, rack_share)
    outcome = consequence(case, record, fitted, settings, trays_per_node=trays, interruptions=interruptions)
    if as_json:
        print_json({"fit": _fit_json(fitted), "consequence": _consequence_json(outcome)})
    else:
        print_line("\n" + _consequence_text(outcome, "the paper's cluster" if cluster is None else str(cluster)))
    if plot is not None:
        from holdfast.cli.planner.spares.plots import plot_fit

        warn(f"wrote {plot_fit(record, fitted, plot)}")


def _interval(value: Estimate) -> str:
    return f"{value.low:,.1f} .. {value.high:,.1f} h"


def _observed(fit: TraceFit, trace: FailureTrace) -> str:
    """Return how long was observed, with dates if the log's clock has them."""
    days = f"in {fit.span_hours / 24:,.0f} days"
    if trace.began_unix_s is None:
        return days
    ends = (trace.began_unix_s, trace.began_unix_s + 3600.0 * fit.span_hours)
    first, last = (datetime.fromtimestamp(each, UTC).strftime("%Y-%m-%d") for each in ends)
    return f"{days}, {first} to {last}"


def _fit_text(fit: TraceFit, trace: FailureTrace) -> str:
    """Return the fit as text: MTBF and MTTR with intervals, and how far gaps and repairs are from exponential."""
    censored = f"; {fit.open_repairs} repairs had not ended" if fit.open_repairs else ""
    rows = [
        ["MTBF per node", f"{fit.mtbf_hours.mean:,.1f} h", _interval(fit.mtbf_hours), _interval(fit.mtbf_bursty_hours)],
        ["MTTR", f"{fit.mttr_hours.mean:,.1f} h", _interval(fit.mttr_hours), _interval(fit.mttr_resampled_hours)],
    ]
    headers = ["", "estimate", f"{fit.confidence:.0%} if exponential", f"{fit.confidence:.0%} by resampling"]
    shapes = [_shape_row("gaps between failures", fit.gaps), _shape_row("repairs", fit.repairs)]
    shape_headers = ["", "mean h", "median h", "CV", "KS", "p", "Weibull shape", "AIC", "lognormal sigma", "AIC"]
    return "\n".join(
        [
            f"{fit.failures:,} failures of {fit.nodes:,} nodes {_observed(fit, trace)}{censored}.",
            "",
            table(headers, rows),
            "",
            "How far from exponential (which has CV 1; AIC below 0 fits better than it):",
            "",
            table(shape_headers, shapes),
            "",
            f"Failures per week vary {fit.weekly_dispersion:.1f} times as much as a Poisson process's.",
        ]
    )


def _shape_row(name: str, shape: ShapeFit) -> list[str]:
    return [
        name,
        f"{shape.mean_hours:,.2f}",
        f"{shape.median_hours:,.2f}",
        f"{shape.cv:.2f}",
        f"{shape.ks_distance:.3f}",
        f"{shape.ks_p_value:.3f}",
        f"{shape.weibull.shape:.2f}",
        f"{shape.weibull_aic:,.0f}",
        f"{shape.lognormal.sigma:.2f}",
        f"{shape.lognormal_aic:,.0f}",
    ]


def _cell(value: Estimate) -> str:
    return f"{value.mean:,.0f} ±{value.high - value.mean:,.0f}"


def _consequence_text(outcome: TraceConsequence, of: str) -> str:
    """Return a table of goodput by strategy, by the closed form and simulated with the trace, and the verdict.

    Args:
        of: names the cluster, for the text.
    """
    failures = outcome.case.failures
    headers = ["strategy", "R/zone", "closed form", *(reality.name for reality in outcome.realities)]
    rows = [
        [row.strategy.label, str(row.spare_blocks), f"{row.closed_form:,.0f}", *(_cell(one) for one in row.simulated)]
        for row in outcome.strategies
    ]
    return "\n".join(
        [
            *_interruptions_words(outcome.interruptions, outcome.implied_interruptions),
            "",
            f"Goodput in GPUs of {of}, with the MTBF of a tray {_hours(failures.mtbf_tray_hours)},",
            f"of a rack {_hours(failures.mtbf_rack_hours)}, and MTTR {float(failures.mttr_hours):,.1f} h, by the",
            "closed form and simulated, with 99 % intervals. With real gaps, bursts are as many failures as in the",
            "trace; with real weeks, they last as long as in the trace and grow with the cluster.",
            "",
            table(headers, rows),
            "",
            *_consequence_words(outcome),
        ]
    )


_EVIDENCE: dict[RackEvidence, str] = {
    "none": "nothing in the log says that a whole rack failed: each failure counts as one of a tray (--rack-share)",
    "given": "by --rack-share",
    "scope": "by the log's own scope",
    "rack": "nodes of a rack that failed within a minute count as one failure of the rack",
    "simultaneous": "nodes that failed at the same time count as one failure of a rack",
}


def _interruptions_words(found: Interruptions, implied: float) -> list[str]:
    return [
        f"Interruptions of a job on all observed nodes: {found.total:,.0f} in the log, {implied:,.0f} by the fit.",
        f"Of whole racks: {found.racks:,.0f} ({100 * found.rack_share:.1f} %; {_EVIDENCE[found.evidence]}).",
    ]


def _hours(mtbf: Floats) -> str:
    value = float(as_floats(mtbf))
    return f"{value:,.0f} h" if value < NEVER_HOURS else "infinite"


def _consequence_words(outcome: TraceConsequence) -> list[str]:
    """Return the recommended strategy, how it does in each simulation, and whether other spare counts do better."""
    best = outcome.strategies[outcome.best_closed_form]
    lines = [f"The closed form recommends {best.strategy.label} with {best.spare_blocks} spare blocks per zone."]
    for index, reality in enumerate(outcome.realities):
        simulated = outcome.strategies[outcome.best_simulated(index)]
        loss = best.simulated[index].mean / best.closed_form - 1.0 if best.closed_form > 0 else 0.0
        keeps = "still best" if simulated is best else f"beaten by {simulated.strategy.label}"
        lines.append(f"  {reality.name}: {100 * loss:+.1f} % against the closed form; {keeps}.")
    mine = best.simulated[-1]
    better = {spares: one for spares, one in outcome.other_spare_blocks.items() if one.low > mine.high}
    if better:
        spares = max(better, key=lambda count: better[count].mean)
        gain = better[spares].mean / mine.mean - 1.0 if mine.mean > 0 else 0.0
        lines.append(
            f"With real weeks, {spares} spare blocks per zone do better than {best.spare_blocks}: {100 * gain:+.1f} %."
        )
    else:
        tried = ", ".join(str(spares) for spares in outcome.other_spare_blocks) or "none"
        lines.append(f"With real weeks, no other number of spare blocks tried does better (tried: {tried}).")
    return lines


def _fit_json(fit: TraceFit) -> dict[str, Any]:
    return asdict(fit)


def _consequence_json(outcome: TraceConsequence) -> dict[str, Any]:
    """Return interruptions, goodput by strategy in GPUs, and the best strategies (indices), for JSON."""
    names = [reality.name for reality in outcome.realities]
    found = outcome.interruptions
    return {
        "interruptions": {
            "log": found.total,
            "fit": outcome.implied_interruptions,
            "of_racks": found.racks,
            "evidence": found.evidence,
        },
        "strategies": [
            {
                "strategy": row.strategy.label,
                "spare_blocks": row.spare_blocks,
                "closed_form_gpus": row.closed_form,
                "simulated_gpus": {name: estimate_json(one) for name, one in zip(names, row.simulated, strict=True)},
            }
            for row in outcome.strategies
        ],
        "best_closed_form": outcome.best_closed_form,
        "best_simulated": {name: outcome.best_simulated(index) for index, name in enumerate(names)},
        "other_spare_blocks_gpus": {
            str(spares): estimate_json(one) for spares, one in outcome.other_spare_blocks.items()
        },
    }
