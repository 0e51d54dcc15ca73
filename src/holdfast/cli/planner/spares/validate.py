"""`holdfast spares validate`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.output import AsJson, print_json, print_line
from holdfast.cli.planner.spares.report import estimate_json, percent, table
from holdfast.cli.planner.spares.toml import read_case
from holdfast.errors import BadInputError
from holdfast.planner.reliability.monte_carlo.estimate import SimulationSettings, synchronous_checkpoint
from holdfast.planner.reliability.monte_carlo.validation import Comparison, compare, compare_repair_mixes
from holdfast.planner.reliability.sparing.case import SparingCase
from holdfast.planner.reliability.sparing.evaluation import evaluate
from holdfast.planning.special import require_finite, require_positive

EPSILONS = (0.0, 0.25, 0.5, 0.75, 1.0)


def validate(
    cluster: Annotated[Path, typer.Argument(metavar="CLUSTER.toml", help="The case; see examples/catalina.toml.")],
    replications: Annotated[int, typer.Option(help="Independent simulations of each row.")] = 20,
    hours: Annotated[float, typer.Option(help="Simulated hours, after a warm-up of 10 MTTR.")] = 8760.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same numbers.")] = 0,
    auto_hours: Annotated[float | None, typer.Option(help="MTTR of automatic repairs (default: MTTR/24).")] = None,
    ticket_hours: Annotated[float | None, typer.Option(help="MTTR of manual repairs (default: 2 MTTR).")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare the closed form with simulations.

    The first simulation has the assumptions of the closed form: no failure happens while the job saves, detects a
    failure or restarts, and each block has rack failures of its own. The next ones drop the first assumption, the
    second, and both: the difference is the error of the closed form. The last one, for the best strategy, has two kinds
    of repairs, of which a share epsilon is automatic.
    """
    case = read_case(cluster).case
    settings = SimulationSettings(replications=replications, hours=hours, seed=seed)
    mttr = float(case.failures.mttr_hours)
    auto, ticket = (auto_hours or mttr / 24.0, ticket_hours or 2.0 * mttr)
    for option, mean in (("--auto-hours", auto), ("--ticket-hours", ticket)):
        require_finite(option, mean)
        require_positive(option, mean)
    synchronous_checkpoint(case)
    _check_goodput(case)
    rows = compare(case, settings)
    best = case.strategies[int(evaluate(case).best)]
    mixed = compare_repair_mixes(
        case, replace(best, spare_blocks=None), settings,
        epsilons=EPSILONS, mttr_auto_hours=auto, mttr_ticket_hours=ticket,
    )  # fmt: skip
    if as_json:
        print_json({"comparisons": [_json(row) for row in rows], "repair_mixes": [_json(row) for row in mixed]})
        return
    print_line(f"{replications} replications of {hours:,.0f} h; 99 % confidence intervals\n")
    print_line(_table(rows))
    print_line(f"\nTwo kinds of repair, {auto:g} h and {ticket:g} h, beside the closed form with their mean:\n")
    print_line(_table(mixed))
    print_line("\n" + _verdict([row for row in rows if row.assumptions == "as the closed form"] + mixed))


def _check_goodput(case: SparingCase) -> None:
    if not (evaluate(case).goodput_gpus > 0).all():
        raise BadInputError("failures: leave some strategy without any goodput, so there is nothing to validate")


def _table(rows: list[Comparison]) -> str:
    """Return the closed form and the simulation of each row as a table: CETT, gap, shares blocked and wasted."""
    cells = [
        [
            row.strategy.label,
            row.assumptions,
            str(row.spare_blocks),
            f"{row.closed_form:.5f}",
            f"{row.cett.mean:.5f}",
            f"±{row.cett.high - row.cett.mean:.5f}",
            f"{100 * row.gap:+.2f}%",
            percent(row.beta.mean, 2),
            percent(row.gamma.mean, 2),
        ]
        for row in rows
    ]
    headers = ["strategy", "simulated", "R/zone", "CETT closed", "simulated", "", "gap", "blocked", "gamma"]
    return table(headers, cells)


def _verdict(rows: list[Comparison]) -> str:
    """Return how many closed-form values lie within the simulation's interval, and the largest gap, in words."""
    inside = sum(row.cett.contains(row.closed_form) for row in rows)
    worst = max(abs(row.gap) for row in rows)
    return (
        f"Under the closed form's assumptions, {inside} of {len(rows)} closed-form values lie within the simulation's "
        f"interval; the largest gap is {100 * worst:.2f} %."
    )


def _json(row: Comparison) -> dict[str, object]:
    return {
        "strategy": row.strategy.label,
        "assumptions": row.assumptions,
        "spare_blocks": row.spare_blocks,
        "closed_form_cett": row.closed_form,
        "cett": estimate_json(row.cett),
        "beta": estimate_json(row.beta),
        "gamma": estimate_json(row.gamma),
        "gap": row.gap,
    }
