"""Words, tables and JSON for `holdfast spares`, and what its commands take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.planner.reliability.monte_carlo.estimate import Estimate
from holdfast.planner.reliability.sparing.case import SparingCase
from holdfast.planner.reliability.sparing.evaluation import HOPELESS_GPUS, Evaluation, StrategyGoodput
from holdfast.planner.reliability.sparing.losses import Losses, losses

ClusterFile = Annotated[Path, typer.Argument(metavar="CLUSTER.toml", help="The case; see examples/catalina.toml.")]
PlotDirectory = Annotated[Path | None, typer.Option("--plot", metavar="DIR", help="Also draw pictures into DIR.")]
LOSS_WORDS = {
    "spare_trays": "idle spare trays inside blocks",
    "spare_blocks": "idle spare blocks",
    "stranded_blocks": "stranded by placement",
    "blocked": "blocked, out of spare blocks",
    "checkpoint_saving": "saving checkpoints",
    "lost_work": "work lost since the last checkpoint",
    "restart": "detecting failures and restarting",
}


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return texts in columns below their headers, the first to the left, the others to the right."""
    widths = [max(len(line[i]) for line in [headers, *rows]) for i in range(len(headers))]
    lines = [headers, ["-" * width for width in widths], *rows]
    return "\n".join(_line(line, widths) for line in lines)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    rest = (cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
    return "  ".join([cells[0].ljust(widths[0]), *rest]).rstrip()


def percent(share: float, digits: int = 1) -> str:
    """Return 0.0863 as 8.6%."""
    return f"{100.0 * share:.{digits}f}%"


def estimate_json(value: Estimate) -> dict[str, float]:
    """Return a mean and its interval."""
    return {"mean": value.mean, "low": value.low, "high": value.high}


def duration(hours: float) -> str:
    """Return hours in the unit that reads best, from seconds to years, with three digits."""
    if hours < 1 / 30:
        return f"{3600 * hours:.3g} s"
    if hours < 2:
        return f"{60 * hours:.3g} min"
    if hours < 48:
        return f"{hours:.3g} h"
    return f"{hours / 24:.3g} days" if hours < 2 * 8760 else f"{hours / 8760:.3g} years"


def hopeless_reason(case: SparingCase, outcome: StrategyGoodput) -> str | None:
    """Return why no goodput remains, or None if some remains."""
    if float(outcome.goodput_gpus) >= HOPELESS_GPUS:
        return None
    if float(outcome.beta) > 0.99:
        return "too many blocks are in repair at any time: some zone is always out of spares"
    return "failures come faster than a checkpoint period completes: no work ever counts"


def evaluation_json(case: SparingCase, evaluation: Evaluation) -> dict[str, Any]:
    """Return what `plan --json` prints of the strategies; fractions unrounded."""
    strategies = [
        {
            "block_gpus": outcome.strategy.block_gpus,
            "working_gpus": outcome.strategy.working_gpus,
            "spare_gpus": outcome.strategy.spare_gpus,
            "spare_blocks": int(outcome.spare_blocks),
            "stranded_blocks": int(outcome.stranded_blocks),
            "block_mtbf_hours": float(outcome.block_mtbf_hours),
            "p_blocked": float(outcome.p_blocked),
            "beta": float(outcome.beta),
            "gamma": float(outcome.gamma),
            "cett": float(outcome.cett),
            "hardware_gain": outcome.hardware_gain,
            "model_gain": outcome.model_gain,
            "goodput_gpus": float(outcome.goodput_gpus),
            "losses": {name: float(share) for name, share in losses(case, outcome).items()},
            "no_goodput_reason": hopeless_reason(case, outcome),
        }
        for outcome in evaluation.strategies
    ]
    return {"strategies": strategies, "best": int(evaluation.best)}


def evaluation_text(case: SparingCase, evaluation: Evaluation) -> str:
    """Return a table of the strategies, why some have no goodput, and the recommendation.

    If no strategy has any goodput, that is said instead of the recommendation.
    """
    rows = [_evaluation_row(case, outcome) for outcome in evaluation.strategies]
    headers = ["block/working", "R/zone", "inter", "intra", "stranded", "CETT", "hardware", "model", "goodput"]
    notes = [
        f"{outcome.strategy.label}: no goodput: {reason}."
        for outcome in evaluation.strategies
        if (reason := hopeless_reason(case, outcome))
    ]
    best = evaluation.strategies[int(evaluation.best)]
    if hopeless_reason(case, best):
        return "\n".join([table(headers, rows), "", *notes, "No strategy leaves any goodput."])
    return "\n".join([table(headers, rows), "", *notes, *_recommendation(case, evaluation, best)])


def _evaluation_row(case: SparingCase, outcome: StrategyGoodput) -> list[str]:
    lost = losses(case, outcome)
    return [
        outcome.strategy.label,
        f"{int(outcome.spare_blocks)}/{outcome.blocks}",
        percent(float(lost.spare_blocks)),
        percent(float(lost.spare_trays)),
        percent(float(lost.stranded_blocks)),
        percent(float(outcome.cett)),
        f"{outcome.hardware_gain:.3f}",
        f"{outcome.model_gain:.3f}",
        f"{float(outcome.goodput_gpus):,.0f}",
    ]


def _recommendation(case: SparingCase, evaluation: Evaluation, best: StrategyGoodput) -> list[str]:
    """Return the best strategy, its spares and losses, and its lead over the second best, in lines."""
    goodput = float(best.goodput_gpus)
    zones, spares = case.cluster.zones, int(best.spare_blocks)
    stranded = f", {zones * int(best.stranded_blocks)} of them stranded by placement" if best.stranded_blocks else ""
    block_life, blocked = duration(float(best.block_mtbf_hours)), percent(float(best.beta), 2)
    lines = [
        f"Best: {best.strategy.label}, {goodput:,.0f} GPUs' worth of training, from {case.cluster.gpus:,} GPUs.",
        f"  Keep {spares} of each zone's {best.blocks} blocks idle ({zones * spares} in all{stranded}),",
        f"  and {best.strategy.spare_gpus} of each block's {best.strategy.block_gpus} GPUs.",
        f"  A block leaves production every {block_life}; the job is blocked {blocked} of the time,",
        f"  and loses {percent(float(best.gamma))} of the rest to failures.",
    ]
    others = [outcome for outcome in evaluation.strategies if outcome is not best]
    if others:
        second = max(others, key=lambda outcome: float(outcome.goodput_gpus))
        ahead = goodput - float(second.goodput_gpus)
        times = f", {goodput / float(second.goodput_gpus):.4f} times as much" if second.goodput_gpus >= 1 else ""
        lines.append(f"Runner-up: {second.strategy.label}; the best does {ahead:,.0f} GPUs' worth more{times}.")
    return [*lines, *_loss_words(case, best, losses(case, best))]


def _loss_words(case: SparingCase, best: StrategyGoodput, lost: Losses) -> list[str]:
    """Return how the GPU time that does not train is lost: a heading, then one line for each cause, largest first."""
    lines = [f"Where the other {percent(1.0 - float(best.cett))} of the GPU time:"]
    for name, share in sorted(lost.items(), key=lambda item: -float(item[1])):
        gpus = float(share) * case.cluster.gpus
        lines.append(f"  {percent(float(share), 2):>7}  {gpus:>9,.0f} GPUs  {LOSS_WORDS[name]}")
    return lines
