"""What `holdfast simulate` prints: tables for people, one document for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec

from holdfast.cli.output import print_json, print_line
from holdfast.cli.planner.spares.report import duration, estimate_json, percent, table
from holdfast.planner.fleet.case import FleetCase, default_sources
from holdfast.planner.fleet.forecast import Forecast, Forecasts, forecast
from holdfast.planner.fleet.recovery import PARTS
from holdfast.planner.fleet.scale import ScaleRow, make_scale_rows
from holdfast.planner.fleet.time_account import OTHER_LOSSES
from holdfast.planner.reliability.monte_carlo.estimate import Estimate, SimulationSettings

WORDS = {
    "detect": "detect: time until a failure is noticed",
    "decide": "decide: stop, reports, decision",
    "tell": "tell: the next generation to all",
    "regroup": "regroup: a new group of workers",
    "transfer": "transfer: state that is missing",
    "redo": "redo: computed again",
    **OTHER_LOSSES,
}


def show_forecast(case: FleetCase, settings: SimulationSettings, *, as_json: bool) -> None:
    """Simulate live recovery and restarts, and print ETTR, goodput, use of the time, and parts of a recovery."""
    found = forecast(case, settings)
    if as_json:
        print_json(_document(case, settings, found))
        return
    print_line(_heading(case))
    print_line(f"{settings.replications} replications of {duration(settings.hours)} each; 99 % confidence intervals\n")
    print_line(_summary(found))
    print_line("\nUse of the time, in percent:\n")
    print_line(_losses(found))
    print_line("\nA recovery, in seconds of training lost:\n")
    print_line(_recovery(found.live))
    print_line(f"\n{_verdict(found)}")


def show_scale(case: FleetCase, *, as_json: bool) -> None:
    """Print how long a recovery takes after one node fails, in jobs of several sizes: a table, or JSON."""
    rows = make_scale_rows(case)
    if as_json:
        print_json({"rows": [_row_json(row) for row in rows], **_model(case)})
        return
    headers = ["nodes", "known after", *PARTS, "lost in all"]
    cells = [
        [
            f"{row.nodes:,}",
            *(f"{seconds:.3g}" for seconds in (row.detected_s, *asdict(row.parts).values(), row.parts.total)),
        ]
        for row in rows
    ]
    step = f"a step of {case.job.step_s:g} s, {case.workers_per_node} workers a node, groups of {case.recovery.groups}"
    print_line(f"One node of a job fails; mean seconds of training lost ({step}):\n")
    print_line(table(headers, cells))


def _heading(case: FleetCase) -> str:
    """Return the size of the job, and how often nodes, racks and the job fail, in words."""
    standbys = f" and {case.standbys:,} standbys" if case.standbys else ""
    mtbf, mttr, often = (duration(hours) for hours in (case.mtbf_hours, case.mttr_hours, 1 / case.failures_per_hour))
    lines = [f"{case.nodes:,} nodes{standbys}; each fails every {mtbf} and is back after {mttr}, on average;"]
    if case.mtbf_rack_hours:
        lines.append(f"a rack of {case.rack_nodes} nodes fails every {duration(case.mtbf_rack_hours)};")
    return "\n".join([*lines, f"so the job is struck every {often}."])


def _seconds(seconds: float) -> str:
    return duration(seconds / 3600)


def _pair(value: Estimate, scale: float = 100.0, digits: int = 2) -> list[str]:
    half = scale * (value.high - value.mean)
    return [f"{scale * value.mean:.{digits}f}", f"±{half:.{digits}f}"]


def _summary(found: Forecasts) -> str:
    """Return a table of ETTR, goodput, failures and roll-backs of live recovery and restarts."""
    live, restarts = found.live, found.restarts
    rows = [
        ["ETTR, % of time that trains", *_pair(live.ettr), *_pair(restarts.ettr)],
        ["goodput, % of the undisturbed job's", *_pair(live.goodput), *_pair(restarts.goodput)],
        ["failures a day", *_pair(live.failures, 1.0), *_pair(restarts.failures, 1.0)],
        ["roll-backs a day", *_pair(live.rollbacks, 1.0), *_pair(restarts.rollbacks, 1.0)],
        ["time between checkpoints", _seconds(found.live_period_s), "", _seconds(found.restarts_period_s), ""],
    ]
    return table(["", "holdfast", "", "restarts", ""], rows)


def _losses(found: Forecasts) -> str:
    """Return a table of the share of time by cause, for live recovery and restarts."""
    nothing = Estimate(mean=0.0, low=0.0, high=0.0)
    rows = [
        [
            WORDS[what],
            *_pair(found.live.lost.get(what, nothing), digits=3),
            *_pair(found.restarts.lost.get(what, nothing), digits=3),
        ]
        for what in WORDS
        if what in found.live.lost or what in found.restarts.lost
    ]
    return table(["", "holdfast", "", "restarts", ""], rows)


def _recovery(live: Forecast) -> str:
    rows = [[WORDS[part], *_pair(live.per_failure[part], 1.0, 3)] for part in PARTS]
    return table(["", "holdfast", ""], rows)


def _verdict(found: Forecasts) -> str:
    """Return in words what costs most, and how live recovery compares with restarts, or only that nothing failed."""
    live, restarts = found.live, found.restarts
    if not live.failures.mean:
        return "Nothing failed: simulate more hours."
    part = live.dominant
    total = sum(each.mean for each in live.per_failure.values())
    most = max(live.lost, key=lambda what: live.lost[what].mean)
    if restarts.goodput.mean > 0:
        comparison = f"Live recovery trains {live.goodput.mean / restarts.goodput.mean:.4f} times as much as restarts."
    else:
        comparison = (
            "A job that restarts never makes progress: failures come faster than a checkpoint period completes."
        )
    return (
        f"Of a recovery, {part} takes most: {live.per_failure[part].mean:.3g} of {total:.3g} s. "
        f"Of all time that is lost, most is this: {WORDS[most]}, {percent(live.lost[most].mean, 2)} of all time.\n"
        f"{comparison}"
    )


def _document(case: FleetCase, settings: SimulationSettings, found: Forecasts) -> dict[str, Any]:
    return {
        "replications": settings.replications,
        "hours": settings.hours,
        "seed": settings.seed,
        "holdfast": {**_forecast_json(found.live), "checkpoint_period_s": found.live_period_s},
        "restarts": {**_forecast_json(found.restarts), "checkpoint_period_s": found.restarts_period_s},
        "dominant_part": found.live.dominant,
        **_model(case),
    }


def _forecast_json(one: Forecast) -> dict[str, Any]:
    return {
        "ettr": estimate_json(one.ettr),
        "goodput": estimate_json(one.goodput),
        "failures_per_day": estimate_json(one.failures),
        "rollbacks_per_day": estimate_json(one.rollbacks),
        "lost_share": {what: estimate_json(share) for what, share in one.lost.items()},
        "per_failure_s": {part: estimate_json(seconds) for part, seconds in one.per_failure.items()},
    }


def _row_json(row: ScaleRow) -> dict[str, Any]:
    parts = {f"{part}_s": seconds for part, seconds in asdict(row.parts).items()}
    return {"nodes": row.nodes, "detected_s": row.detected_s, **parts, "total_s": row.parts.total}


def _model(case: FleetCase) -> dict[str, Any]:
    """Return every number of the model, and where the defaults come from."""
    return {"model": msgspec.to_builtins(case), "sources": default_sources()}
