"""Lazarus, Figures 6, 7, 9 and 11 with real jobs on this machine: small experts, recorded routing, real kills.

MEASURED, with an EMULATED accelerator (described in `benchmarks/spot.py`): ten nodes share a few cores, so an expert's
computation takes a stated time per token, the same for all systems. The baselines run in the same processes: DS(FT) is
`--static-experts`, and DS also restarts all nodes. Neither pads, and both restart from a warm zygote, so they are
stronger than the paper's. Time runs faster than in the paper: 20x (Figure 6), 160x (7), 30x (9 and 11).

    python benchmarks/lazarus/figures_measured.py [--model L] [--figure 9] [--data DIR] [--out DIR]

Each model and figure takes five to ten minutes.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from drawing import draw_lines_and_totals, draw_stacked, make_sheet, save
from setting import MODELS, above_zero, make_parser, require_file, run_figure

from holdfast.observability.accounts.time_ledger import TimeLedger
from holdfast.observability.accounts.time_spans import Cause
from holdfast.observability.report import committed_steps
from holdfast.protocol.events import ReadEvent

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from spot import GOALS, POLICIES, PolicyResult, TraceBench, account, single_failures

#: Speed, seconds between failures (0 for the spot trace), total seconds, and the name in `spot.GOALS`.
FIGURES = {
    6: (20.0, 300, 1800, "single failures"),
    7: (160.0, 2400, 14400, "rare failures"),
    9: (30.0, 0, 4800, "spot"),
}


def progress(events: Sequence[ReadEvent], speed: float) -> tuple[list[float], list[float]]:
    """Return seconds of the paper's time since the first step, and samples trained until then in committed steps.

    There are too few steps for a rate: one step takes a minute of the paper's time.
    """
    steps = committed_steps(events)
    seconds = [speed * (step.time - steps[0].time) for step in steps]
    return seconds, list(itertools.accumulate((float(step.samples) for step in steps[1:]), initial=0.0))


def time_shares(events: Sequence[ReadEvent]) -> dict[Cause, float]:
    """Return the shares of the time from the first committed step on, by cause."""
    ledger = TimeLedger()
    first = committed_steps(events)[0].time
    before = dict.fromkeys(Cause, 0.0)
    for event in events:
        ledger.add_event(event)
        if event.time <= first:
            before = dict(ledger.account().seconds)
    seconds = ledger.account().seconds
    left = {cause: seconds[cause] - before[cause] for cause in Cause}
    return {cause: one / sum(left.values()) for cause, one in left.items()}


def trace_of(figure: int, data: Path, folder: Path) -> Path:
    """Return the availability trace of a figure."""
    every = FIGURES[figure][1]
    return single_failures(folder, every) if every else require_file(data, Path("spot") / "lazarus_p3_80min_cap10.csv")


def measure(figure: int, model: str, options: argparse.Namespace) -> dict[str, list[ReadEvent]]:
    """Run a job of each policy through a figure's trace; return their events."""
    require_file(options.data, Path("routing") / MODELS[model].recording)
    speed, _, seconds, _ = FIGURES[figure]
    with tempfile.TemporaryDirectory(prefix="holdfast-figures-") as folder:
        bench = TraceBench(options, model, Path(folder))
        trace = trace_of(figure, options.data, Path(folder))
        return {policy: bench.run_trace(trace, speed, policy, ("--until", str(seconds))) for policy in POLICIES}


def show(figure: int, model: str, lived: dict[str, PolicyResult], where: dict[str, dict[Cause, float]]) -> None:
    """Print one model's rows."""
    goals = GOALS.get((FIGURES[figure][3], model), {})
    for policy, run in lived.items():
        ratio = lived["holdfast"].samples / max(1, run.samples)
        shares = "  ".join(f"{cause.value} {share:.0%}" for cause, share in where[policy].items() if share > 0.005)
        print(
            f"  {MODELS[model].name}  {policy:9}{run.samples:7} samples  holdfast's over: {ratio:5.2f} (paper "
            f"{goals.get(policy, '-')!s:>3})  restarts {run.restarts:2}  {shares}",
            flush=True,
        )


def make(options: argparse.Namespace) -> None:
    """Run the jobs, print and draw."""
    for figure in options.figure or (6, 9):
        speed, _, seconds, name = FIGURES[figure]
        print(f"Figure{'s 9 and 11' if figure == 9 else f' {figure}'}, MEASURED here at {speed:g}x, EMULATED: {name}")
        for model in options.model or ("L",):
            events = measure(figure, model, options)
            lived = {policy: account(read, read[-1].time) for policy, read in events.items()}
            where = {policy: time_shares(read) for policy, read in events.items()}
            show(figure, model, lived, where)
            drawing, panels = make_sheet(3 if figure == 9 else 2, width=5.0)
            draw_lines_and_totals(
                (panels[0], panels[1]),
                f"Figure {figure}, {MODELS[model].name} (measured here, {speed:g}x)",
                {policy: progress(read, speed) for policy, read in events.items()},
                {policy: float(run.samples) for policy, run in lived.items()},
                GOALS.get((name, model), {}),
            )
            panels[0].set_xlim(0, seconds / 60)
            panels[0].set_ylabel("samples that count")
            panels[0].legend(fontsize=8)
            if figure == 9:
                draw_stacked(panels[2], list(where), {c.value: [where[p][c] for p in where] for c in Cause})
                panels[2].set_title("Figure 11: share of time by cause", fontsize=10)
                panels[2].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
            save(drawing, options.out, f"figure_{figure}_measured_{model}")


def main(words: Sequence[str] | None = None) -> int:
    """Run; return 2 if the data is missing."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), action="append", help="L by default")
    parser.add_argument("--figure", type=int, choices=sorted(FIGURES), action="append", help="6 and 9 by default")
    parser.add_argument("--seconds-per-token", type=above_zero, default=2e-3)
    return run_figure(make, parser.parse_args(words))


if __name__ == "__main__":
    sys.exit(main())
