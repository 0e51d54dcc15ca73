"""Unicron, Figure 8: a step of eight micro-batches in four replicas of two stages, undisturbed and with one lost.

The paper's figure is a drawing without numbers. Ours uses the functions that assign micro-batches in a real job
(`coordination.generations.assignment`): the initial assignment, and the reassignment when a replica is lost before the
reduction (the paper's scenario 1). k' = k + k / (DP - 1) holds only if it is an integer. Here it is not, and the
survivors have 3, 3 and 2. Stages alternate one forward and one backward (1F1B).

    python benchmarks/unicron/figure_8_redone.py [--out DIR]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from evaluation import make_parser, run_unicron_figure, write_assumptions
from lazarus.drawing import make_sheet, save

from holdfast.coordination.generations.assignment import keep_summed, round_robin

REPLICAS, STAGES, MICRO_BATCHES = 4, 2, 8
#: Units of time: a stage's forward and backward of a micro-batch, the reduction, and a recovery with its detection.
FORWARD, BACKWARD, REDUCE, MEND = 1.0, 2.0, 1.5, 2.0
LOST, LOST_AT = REPLICAS - 1, 4.5
FORWARD_COLOUR, BACKWARD_COLOUR, REDUCE_COLOUR, MEND_COLOUR = "#9ecae1", "#3182bd", "#d68910", "#c0392b"


@dataclass(frozen=True)
class Work:
    """One forward or backward of a stage of a replica."""

    stage: int
    what: str
    micro_batch: int
    begin: float
    end: float


def pipeline(micro_batches: Sequence[int], begin: float) -> list[Work]:
    """Return the work of the stages: after the first forwards, each stage alternates one forward and one backward."""
    orders = [_order(micro_batches, stage) for stage in range(STAGES)]
    done: dict[tuple[str, int, int], float] = {}
    free = [begin] * STAGES
    found: list[Work] = []
    while any(orders):
        for stage, order in enumerate(orders):
            if not order:
                continue
            what, micro_batch = order[0]
            ready = _ready(done, what, micro_batch, stage, begin)
            if ready is None:
                continue
            order.pop(0)
            start = max(free[stage], ready)
            free[stage] = start + (FORWARD if what == "F" else BACKWARD)
            done[what, micro_batch, stage] = free[stage]
            found.append(Work(stage, what, micro_batch, start, free[stage]))
    return found


def _order(micro_batches: Sequence[int], stage: int) -> list[tuple[str, int]]:
    ahead = min(STAGES - 1 - stage, len(micro_batches))
    order = [("F", one) for one in micro_batches[:ahead]]
    for place, one in enumerate(micro_batches):
        later = place + ahead
        order += [("F", micro_batches[later])] if later < len(micro_batches) else []
        order.append(("B", one))
    return order


def _ready(
    done: dict[tuple[str, int, int], float], what: str, micro_batch: int, stage: int, begin: float
) -> float | None:
    """Return when the inputs of an operation are ready, or None if that is not known yet."""
    if what == "F":
        return begin if stage == 0 else done.get(("F", micro_batch, stage - 1))
    if stage == STAGES - 1:
        return done.get(("F", micro_batch, stage))
    return done.get(("B", micro_batch, stage + 1))


def undisturbed() -> list[list[Work]]:
    """Return the work of each replica."""
    return [pipeline(round_robin(MICRO_BATCHES, REPLICAS, rank), 0.0) for rank in range(REPLICAS)]


def disturbed() -> tuple[list[list[Work]], list[tuple[int, ...]]]:
    """Return the work of each replica if one is lost before the reduction, and the survivors' shares afterwards.

    The survivors finish the work they have started. Then the lost micro-batches are assigned to them.
    """
    before = undisturbed()
    survivors = [rank for rank in range(REPLICAS) if rank != LOST]
    mine = [round_robin(MICRO_BATCHES, REPLICAS, rank) for rank in survivors]
    shares = keep_summed(MICRO_BATCHES, mine, mine)
    found: list[list[Work]] = []
    for rank, share in zip(survivors, shares, strict=True):
        more = [one for one in share if one not in round_robin(MICRO_BATCHES, REPLICAS, rank)]
        begin = max(max(work.end for work in before[rank]), LOST_AT + MEND)
        found.append(before[rank] + (pipeline(more, begin) if more else []))
    lost = [work for work in before[LOST] if work.end <= LOST_AT]
    return [*found, lost], list(shares)


def draw(axes: Any, title: str, work: Sequence[Sequence[Work]], lost: bool) -> None:
    """Draw one lane for each stage of each replica."""
    end = max(one.end for lane in work for one in lane)
    for rank, lane in enumerate(work):
        for one in lane:
            lane_at = rank * STAGES + one.stage
            colour = FORWARD_COLOUR if one.what == "F" else BACKWARD_COLOUR
            axes.barh(lane_at, one.end - one.begin, 0.8, left=one.begin, color=colour, edgecolor="white")
            ink = "black" if one.what == "F" else "white"
            middle = (one.begin + one.end) / 2
            axes.annotate(str(one.micro_batch + 1), (middle, lane_at), ha="center", va="center", fontsize=7, color=ink)
        if not (lost and rank == LOST):
            for stage in range(STAGES):
                axes.barh(rank * STAGES + stage, REDUCE, 0.8, left=end, color=REDUCE_COLOUR, edgecolor="white")
    if lost:
        axes.plot([LOST_AT], [LOST * STAGES + 0.5], "x", color=MEND_COLOUR, markersize=11, markeredgewidth=2.5)
        axes.annotate("lost", (LOST_AT + 0.4, LOST * STAGES + 0.5), va="center", fontsize=8, color=MEND_COLOUR)
        axes.axvspan(LOST_AT, LOST_AT + MEND, color=MEND_COLOUR, alpha=0.12)
    labels = [f"DP {rank + 1}, PP {stage + 1}" for rank in range(REPLICAS) for stage in range(STAGES)]
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("time, in forwards of one stage")
    axes.set_title(title, fontsize=10)
    axes.set_xlim(0, 18)
    axes.set_xticks(range(0, 19, 2))
    for name, colour in (("forward", FORWARD_COLOUR), ("backward", BACKWARD_COLOUR), ("all-reduce", REDUCE_COLOUR)):
        axes.barh(0, 0, color=colour, label=name)
    if lost:
        axes.barh(0, 0, color=MEND_COLOUR, alpha=0.2, label="detected, regrouped")
    axes.legend(fontsize=7, loc="lower right", ncols=2)


def make(options: argparse.Namespace) -> None:
    """Print and draw."""
    work, shares = disturbed()
    print("Figure 8: micro-batches of a step of 8 in 4 replicas of 2 stages")
    for rank in range(REPLICAS):
        print(f"  DP {rank + 1}: {[one + 1 for one in round_robin(MICRO_BATCHES, REPLICAS, rank)]}")
    lost_share = MICRO_BATCHES / REPLICAS
    print(f"  DP {LOST + 1} lost before the reduction; the paper's k' = {lost_share + lost_share / (REPLICAS - 1):.2f}")
    for rank, share in enumerate(shares):
        print(f"  DP {rank + 1}: {[one + 1 for one in share]}")
    figure, panels = make_sheet(2, width=7.0, height=3.6)
    draw(panels[0], "a step without failures", undisturbed(), lost=False)
    draw(panels[1], "scenario 1: a replica is lost before the all-reduce", work, lost=True)
    figure.suptitle("Unicron, Figure 8: data and pipeline parallelism; micro-batches by number", fontsize=12)
    said = (
        "the paper's figure is a drawing without numbers, of 8 micro-batches too",
        "who computes which micro-batch: holdfast's own functions; a replica of its jobs is one worker so far",
        "ASSUMED: a backward takes two forwards; both stages take as long; the all-reduce and the recovery as drawn",
        "k' = k + k / (DP - 1) = 2.67 is not an integer: the survivors have 3, 3 and 2, and keep their finished work",
    )
    write_assumptions(figure, said, width=180)
    save(figure, options.out, "figure_8")


if __name__ == "__main__":
    sys.exit(run_unicron_figure(make, make_parser(__doc__).parse_args()))
