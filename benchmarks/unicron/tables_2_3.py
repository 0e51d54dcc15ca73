"""Unicron, Tables 2 and 3: detection times of failures, and the plans for the five cases of six jobs.

Table 2: the paper's times and those measured by `benchmarks/detect.py` (make bench-detect). Its output is read from
--detected FILE, by default from `detected.txt` next to this script, which states when and how it was produced. Table 3:
sizes and weights as printed; the nodes that the pool's state machine gives each job under `waf`, and the results of the
policies `equal` and `weighted`.

    python benchmarks/unicron/tables_2_3.py [--detected FILE] [--out DIR]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from evaluation import NODES, make_parser, run_unicron_figure, write_assumptions
from lazarus.drawing import make_sheet, save

from holdfast.errors import BadInputError
from holdfast.planner.fleet.pool.comparison import best_waf_without_failures, make_node_shares
from holdfast.planner.fleet.pool.gpt_tasks import TABLE_3, make_table_3_jobs
from holdfast.planner.fleet.pool.outages import make_node_names
from holdfast.planner.fleet.pool.systems import SYSTEMS

#: Table 2: the case, Unicron's method, the time with it and without, and the name in `benchmarks/detect.py`.
TABLE_2 = (
    ("1", "node health monitoring", "5.6 s", "5.7 s", "lost node"),
    ("2", "process supervision", "1.8 s", "30 min", "killed process"),
    ("3", "exception propagation", "0.3 s", "30 min", "exception"),
    ("4", "statistical monitoring", "3 x D_iter", "30 min", "hung thread"),
)
#: Recorded output of `benchmarks/detect.py`.
DETECTED = Path(__file__).with_name("detected.txt")
POLICIES = ("waf", "equal", "weighted")


def read_detected(path: Path) -> dict[str, str]:
    """Return the output of `benchmarks/detect.py` for each case."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"--detected {path}: cannot be read ({error})") from None
    found: dict[str, str] = {}
    for *_, case in TABLE_2:
        row = next((line for line in lines if line.startswith(case)), None)
        if row is None:
            raise BadInputError(f"--detected {path}: has no line of {case!r}: give the output of benchmarks/detect.py")
        found[case] = row.split("  ")[-1].strip()
    found["step"] = next((line.strip() for line in lines if line.startswith("median step")), "")
    return found


def plan_rows() -> list[list[str]]:
    """Return a row for each case of Table 3: jobs, nodes, and each policy's WAF as a share of the best."""
    rows: list[list[str]] = []
    for case, (sizes, weights) in TABLE_3.items():
        tasks = make_table_3_jobs(case, NODES)
        most = best_waf_without_failures(tasks, NODES)
        jobs = ", ".join(f"{size} x {weight}" for size, weight in zip(sizes, weights, strict=True))
        shares: list[str] = []
        held = ""
        for policy in POLICIES:
            given = make_node_shares(SYSTEMS[policy], tasks, make_node_names(NODES), machine=True)
            shares.append(f"{sum(task.waf(given.size_of(task.name)) for task in tasks) / most:.4f}")
            held = held or " ".join(str(given.size_of(task.name)) for task in tasks)
        rows.append([str(case), jobs, held, f"{most / 1e15:.2f}", *shares])
    return rows


def draw(axes: Any, title: str, headers: list[str], rows: list[list[str]], widths: list[float]) -> None:
    """Print a table, and draw it."""
    print(title)
    for row in (headers, *rows):
        print("  " + " | ".join(row))
    axes.axis("off")
    axes.set_title(title, fontsize=10)
    made_of = axes.table(cellText=rows, colLabels=headers, colWidths=widths, loc="center", cellLoc="left")
    made_of.auto_set_font_size(False)
    made_of.set_fontsize(8)
    made_of.scale(1, 1.4)


def make(options: argparse.Namespace) -> None:
    """Print and draw both."""
    ours = read_detected(options.detected)
    rows = [[*papers, ours[kind]] for *papers, kind in TABLE_2]
    figure, panels = make_sheet(1, 2, width=12.0, height=2.6)
    headers = ["case", "method", "Unicron", "without", "ours, s: median (range; count)"]
    draw(panels[0], "Table 2: detected after", headers, rows, [0.06, 0.24, 0.14, 0.14, 0.34])
    headers = ["case", "jobs (size x weight)", "nodes under waf", "PFLOP/s", *(f"{name} / best" for name in POLICIES)]
    draw(
        panels[1],
        "Table 3, and its plans on 16 nodes",
        headers,
        plan_rows(),
        [0.05, 0.47, 0.12, 0.08, 0.09, 0.09, 0.11],
    )
    said = [
        "2: the paper's on a GPU cluster; ours by make bench-detect, four processes as nodes on two cores",
        f"2: D_iter: the mean step; ours: {ours['step'].split(';')[0]}; a hung thread: from the start of its step",
        "3: FLOP/s by a model of ours (gpt_tasks.py); the pool's own machine; best: of all that keep T_necessary",
    ]
    write_assumptions(figure, said)
    save(figure, options.out, "tables_2_3")


if __name__ == "__main__":
    reader = make_parser(__doc__)
    reader.add_argument("--detected", type=Path, default=DETECTED, help="file with the output of benchmarks/detect.py")
    sys.exit(run_unicron_figure(make, reader.parse_args()))
