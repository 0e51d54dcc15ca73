"""What `holdfast spares plan` says of warm standbys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from holdfast.cli.planner.spares.report import percent, table
from holdfast.cli.planner.spares.toml import CaseFile, node_of
from holdfast.errors import BadInputError
from holdfast.planning.standbys import StandbyCase, StandbyPlan, plan_standbys

PANEL = "Standbys"
#: Most standby nodes: the computation takes as many steps.
_MOST_NODES = 100_000
#: Share of the nodes that must train with the best number of standbys.
_HOPELESS_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class StandbyOptions:
    """How long the job stops; in place of what CLUSTER.toml says."""

    down_with: Annotated[
        float | None,
        typer.Option(
            help="Pause per failure with a warm standby, in s.",
            show_default="[standbys] in CLUSTER.toml",
            rich_help_panel=PANEL,
        ),
    ] = None
    down_without: Annotated[
        float | None,
        typer.Option(
            help="Pause per failure without a standby, in s.",
            show_default="[standbys] in CLUSTER.toml",
            rich_help_panel=PANEL,
        ),
    ] = None

    @property
    def given(self) -> bool:
        """Whether the user asks for standbys."""
        return self.down_with is not None or self.down_without is not None


def planned_standbys(file: CaseFile, options: StandbyOptions) -> tuple[StandbyCase, StandbyPlan] | None:
    """Return how many warm standby nodes pay for themselves, or None if neither the file nor the options ask for it.

    A standby does not train, but shortens the stop after a failure. Rack failures are left out: they take many nodes
    at once, and single standby nodes do not help.

    Raises:
        BadInputError: a time is missing, or breaks a rule.
    """
    section = file.standbys
    if not options.given and section.down_seconds_with is None and section.down_seconds_without is None:
        return None
    case = _standby_case(file, options.down_with, options.down_without)
    return case, plan_standbys(case)


def _standby_case(file: CaseFile, down_with: float | None, down_without: float | None) -> StandbyCase:
    """Return the case for planning standbys. Options replace the file's down times (seconds).

    Raises:
        BadInputError: a down time is missing, or the nodes do not make up the cluster or are too many.
    """
    section, cluster, failures = file.standbys, file.case.cluster, file.case.failures
    node_gpus, mtbf = node_of(cluster, failures, section)
    if cluster.gpus // node_gpus > _MOST_NODES:
        raise BadInputError(
            f"standbys.node_gpus = {node_gpus}: makes {cluster.gpus // node_gpus:,} nodes of the cluster, "
            f"and standbys are planned for at most {_MOST_NODES:,}"
        )
    with_one = section.down_seconds_with if down_with is None else down_with
    without = section.down_seconds_without if down_without is None else down_without
    if with_one is None or without is None:
        missing = "down_seconds_with" if with_one is None else "down_seconds_without"
        raise BadInputError(f"standbys.{missing}: is missing; give it in CLUSTER.toml or as an option")
    return StandbyCase(
        nodes=cluster.gpus // node_gpus,
        mtbf_node_hours=mtbf,
        mttr_hours=float(failures.mttr_hours),
        down_seconds_with=with_one,
        down_seconds_without=without,
    )


def _row(plan: StandbyPlan, count: int) -> dict[str, float | int]:
    return {
        "standbys": count,
        "p_none_ready": float(plan.p_none_ready[count]),
        "stopped": float(plan.stopped[count]),
        "goodput_nodes": float(plan.goodput_nodes[count]),
    }


def _shown(plan: StandbyPlan) -> list[int]:
    """Return the numbers of standbys for the table: around the best number, and the most that still pay."""
    best, top = plan.best, plan.standbys.size - 1
    steps = {0, 1, best // 4, best // 2, 3 * best // 4, best - 1, best, best + 1, 2 * best, plan.most_that_pay}
    return sorted(count for count in steps if 0 <= count <= top)


def standbys_json(case: StandbyCase, plan: StandbyPlan) -> dict[str, object]:
    return {
        "nodes": case.nodes,
        "best": plan.best,
        "hopeless": _is_hopeless(case, plan),
        "most_that_pay": plan.most_that_pay,
        "gain_nodes": float(plan.goodput_nodes[plan.best] - plan.goodput_nodes[0]),
        "plans": [_row(plan, count) for count in _shown(plan)],
    }


def standbys_text(case: StandbyCase, plan: StandbyPlan) -> str:
    """Return a table of job stops and goodput by number of standbys, and the recommended number."""
    rows = [
        [
            f"{count:,}",
            percent(float(plan.p_none_ready[count]), 3),
            percent(float(plan.stopped[count]), 2),
            f"{float(plan.goodput_nodes[count]):,.1f}",
            f"{float(plan.goodput_nodes[count] - plan.goodput_nodes[0]):+,.1f}",
        ]
        for count in _shown(plan)
    ]
    headers = ["standbys", "none ready", "job stopped", "goodput nodes", "against none"]
    about = (
        f"{case.nodes:,} nodes, one failing every {case.mtbf_node_hours / case.nodes * 60:.3g} min, "
        f"back after {case.mttr_hours:g} h; a failure stops the job for {case.down_seconds_with:g} s with a standby "
        f"ready, {case.down_seconds_without:g} s without."
    )
    return "\n".join([about, "", table(headers, rows), "", _verdict(case, plan)])


def _is_hopeless(case: StandbyCase, plan: StandbyPlan) -> bool:
    """Whether more than half of the nodes' time is lost, even with the best number of standbys."""
    return float(plan.goodput_nodes[plan.best]) < _HOPELESS_SHARE * case.nodes


def _verdict(case: StandbyCase, plan: StandbyPlan) -> str:
    """Return the best number of standbys and its gain, or why none pays."""
    if _is_hopeless(case, plan):
        left = percent(float(plan.goodput_nodes[plan.best]) / case.nodes, 1)
        return (
            f"No number of standbys makes this cluster usable: at most {left} of it trains. "
            "Failures must become rarer, repairs faster, or stops shorter."
        )
    if plan.best == 0:
        return "No standby pays for itself: each costs more training than it saves."
    gain = float(plan.goodput_nodes[plan.best] / plan.goodput_nodes[0] - 1.0)
    return (
        f"Best: {plan.best:,} standbys, {percent(gain, 2)} more goodput than with none. "
        f"Up to {plan.most_that_pay:,} are still better than none."
    )
