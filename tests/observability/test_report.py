"""The report of a job, computed from its events."""

from __future__ import annotations

from itertools import combinations
from math import isnan
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from rich.console import Console
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast.cli.following.progress import describe_with_time
from holdfast.cli.history.memory_plot import draw_memory, newest_change, plot_memory
from holdfast.cli.history.report import print_report
from holdfast.cli.history.report_plot import plot_events
from holdfast.errors import BadInputError
from holdfast.observability.report import committed_steps, make_report
from holdfast.protocol.events import AnyEvent
from holdfast.protocol.messages.memory import MemoryOfNode, MemorySample
from made_events import joined, made


def step(number: int, time: float, **fields: Any) -> AnyEvent:
    return made("step_committed", time, **{"step": number, "loss": 1.0 / number, "samples": 8, "step_s": 1.0, **fields})


def test_the_report_adds_up_steps_and_recoveries() -> None:
    events = [
        made("job_started", job="j"),
        joined("a", 0.5),
        made("generation_started", 0.5, reason="start", members=("a", "b")),
        *[step(number, float(number)) for number in range(1, 5)],
        made("failure_detected", 4.25, node="b"),
        step(5, 5.5),
        made("recovered", 5.5, action="shrink", state_source="none", down_s=1.25),
        made("job_finished", 6.0),
    ]
    report = make_report(events)
    assert (report.job, report.outcome, report.steps, report.samples, report.gaps) == ("j", "finished", 5, 40, 0)
    assert report.elapsed_s == 6.0
    assert report.median_step_s == 1.0
    assert sum(report.time.seconds.values()) == report.time.wall_s == 6.0
    (recovery,) = report.recoveries
    assert (recovery.nodes, recovery.down_s, recovery.extra_s) == (("b",), 1.25, 0.25)


def test_the_report_counts_skipped_steps_and_rebalances() -> None:
    events = [
        made("job_started"),
        step(1, 1.0),
        made("rebalanced", 1.5, experts_moved=4),
        step(2, 2.0, skipped=True),
    ]
    report = make_report(events)
    assert (report.skipped, report.overflows, report.rebalances, report.redealt) == (1, 0, 1, 0)


def test_steps_skipped_for_nan_are_not_attributed_to_the_loss_scale() -> None:
    """NaN must not be reported as "skipped by the loss scale"."""
    events = [
        made("job_started"),
        step(1, 1.0, skipped=True),
        step(2, 2.0, skipped=True, overflow=True),
        step(3, 3.0, skipped=True),
    ]
    console = Console(record=True, width=200)
    print_report(make_report(events), console)
    text = console.export_text()
    assert "steps skipped because the loss scale was too large: 1\n" in text.replace(" \n", "\n")
    assert "steps skipped because of NaN or infinite gradients, or by the script: 2\n" in text.replace(" \n", "\n")


def test_redistributed_micro_batches_do_not_count_as_moved_experts() -> None:
    """A rebalance of a dense job after a straggler must not be reported as "experts moved after their loads"."""
    report = make_report([made("job_started"), step(1, 1.0), made("rebalanced", 1.5, experts_moved=0), step(2, 2.0)])
    assert (report.rebalances, report.redealt) == (0, 1)


@pytest.mark.parametrize("reason", ["drain", "move"])
def test_drained_and_moved_nodes_are_distinguished_from_failures(reason: str) -> None:
    """They must not be reported as "shrink" or "replace" without nodes."""
    events = [
        made("job_started"),
        joined("a", 0.5),
        made("generation_started", 0.5, reason="start", members=("a", "b")),
        step(1, 1.0),
        made("generation_started", 1.1, reason=reason, members=("a",)),
        step(2, 2.0),
        made("recovered", 2.0, action="shrink", state_source="none", down_s=1.0),
        made("failure_detected", 2.5, node="a"),
        made("generation_started", 2.6, reason="failure", members=("c",)),
        step(3, 3.0),
        made("recovered", 3.0, action="replace", state_source="none", down_s=1.0),
    ]
    left, failed = make_report(events).recoveries
    assert (left.cause, left.action, left.nodes) == (reason, "shrink", ("b",))
    assert (failed.cause, failed.action, failed.nodes) == ("replace", "replace", ("a",))


def test_steps_undone_by_a_rollback_do_not_count() -> None:
    events = [*[step(n, float(n)) for n in (1, 2, 3)], made("rolled_back", 4.0, to_step=1)]
    events += [step(2, 5.0), step(3, 6.0)]
    assert [(e.step, e.time) for e in committed_steps(events)] == [(1, 1.0), (2, 5.0), (3, 6.0)]
    assert make_report(events).gaps == 0


def test_an_unknown_loss_can_be_reported_and_plotted(tmp_path: Path) -> None:
    events = [made("job_started"), step(1, 1.0, loss=None), step(2, 2.0)]
    assert make_report(events).first_loss is None
    plot_events(events, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 0
    assert "loss -" in describe_with_time(step(1, 1.0, loss=None))


def test_a_missing_step_is_counted_as_a_gap() -> None:
    assert make_report([step(1, 1.0), step(3, 2.0)]).gaps == 1


def test_the_memory_plot_shows_leaving_joining_and_remaining_nodes(tmp_path: Path) -> None:
    def held(node: str, role: str) -> MemoryOfNode:
        samples = tuple(MemorySample(ago_s=float(5 - at), memory=at << 20, sent=at) for at in range(5))
        return MemoryOfNode(node=node, role=role, peak=4 << 20, samples=samples)

    move = made("memory_sampled", 2.0, nodes=(held("a", "leaver"), held("s", "joiner"), held("b", "stayer")))
    loss = made("memory_sampled", 3.0, nodes=(held("b", "stayer"),))
    assert newest_change([loss]) is loss
    assert newest_change([move, loss]) is move
    figure = Figure()
    draw_memory(figure, move, 0.0)
    memory, rates = figure.axes
    assert [text.get_text() for text in memory.get_legend().get_texts()] == ["a leaves", "s joins", "b stays"]
    assert (memory.get_ylabel(), rates.get_ylabel().split("\n")[0]) == ("memory, MB", "state, MB per second")
    plot_memory([made("job_started"), move], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    with pytest.raises(BadInputError, match="no samples of memory"):
        plot_memory([made("job_started")], tmp_path / "plot.png")


def test_the_legend_of_many_nodes_is_shortened() -> None:
    samples = tuple(MemorySample(ago_s=float(2 - at), memory=at << 20, sent=at) for at in range(2))
    nodes = tuple(MemoryOfNode(node=f"n{number}", role="joiner", peak=1, samples=samples) for number in range(50))
    figure = Figure()
    draw_memory(figure, made("memory_sampled", 2.0, nodes=nodes), 0.0)
    for axes in figure.axes:
        names = [text.get_text() for text in axes.get_legend().get_texts()]
        assert names == [*(f"n{number} joins" for number in range(9)), "41 more nodes"]


def test_every_line_of_the_plot_is_in_a_legend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr("holdfast.cli.history.report_plot.save_figure", lambda figure, *_: drawn.append(figure))
    started = made("generation_started", 0.5, members=("a", "b"), world_size=2)
    failed = made("failure_detected", 1.5, node="b")
    plot_events([made("job_started"), started, step(1, 1.0), failed, step(2, 2.0)], tmp_path / "plot.png")
    (figure,) = drawn
    assert [axes.get_ylabel() for axes in figure.axes] == ["samples per second", "nodes", "seconds per step", "loss"]
    for axes in figure.axes:
        names = [text.get_text() for text in axes.get_legend().get_texts()]
        marks = 1  # The dashed line of the failure, with its name next to it.
        assert len(axes.get_lines()) == len(names) + marks
        assert not any(name.startswith("_") for name in names)
    assert [text.get_text() for text in figure.axes[0].texts] == ["b fails"]


RESUMED = [
    made("job_started", 0.0),
    made("generation_started", 0.5, members=("a", "b"), world_size=2),
    *(step(number, float(number)) for number in range(1, 11)),
    made("job_finished", 10.5, resumable=True),
    made("coordinator_restarted", 500.0),
    made("rolled_back", 503.0, to_step=10),
    joined("c", 503.1),
    made("generation_started", 503.2, members=("a", "c"), world_size=2),
    step(11, 504.0, step_s=493.5),
    *(step(number, 493.0 + number) for number in range(12, 21)),
]


def test_plot_lines_of_a_resumed_job_have_a_gap_at_the_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr("holdfast.cli.history.report_plot.save_figure", lambda figure, *_: drawn.append(figure))
    plot_events(RESUMED, tmp_path / "plot.png")
    for axes in drawn[0].axes:
        for line in axes.get_lines():
            points = list(zip(line.get_xdata(), line.get_ydata(), strict=True))
            if line.get_linestyle() == "--":
                continue  # This line is a mark.
            breaks = [at for at, value in points if isnan(value)]
            assert any(10.0 <= at <= 504.0 for at in breaks), axes.get_ylabel()
            values = [value for _, value in points if not isnan(value)]
            assert max(values) < 100.0, "the pause counts neither as a step's time nor in the throughput"


def test_event_labels_in_the_plot_do_not_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr("holdfast.cli.history.report_plot.save_figure", lambda figure, *_: drawn.append(figure))
    plot_events(RESUMED, tmp_path / "plot.png")
    (figure,) = drawn
    assert [text.get_text() for text in figure.axes[0].texts] == ["new coordinator, back to step 10, c joins"]
    fails = [made("failure_detected", 100.0 + 9.9 * number, node=f"node-{number}") for number in range(20)]
    plot_events([*RESUMED[:13], *fails, *RESUMED[14:]], tmp_path / "plot.png")
    figure = drawn[-1]
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert len(boxes) > 1
    assert not [one for one, other in combinations(boxes, 2) if one.overlaps(other)]
    assert max(box.x1 for box in boxes) <= figure.bbox.x1


def test_nodes_with_the_same_role_have_different_colours() -> None:
    samples = tuple(MemorySample(ago_s=float(2 - at), memory=at << 20, sent=at) for at in range(2))
    roles = ("joiner", "joiner", "leaver", "leaver", "stayer", "stayer", "stayer")
    nodes = tuple(MemoryOfNode(node=f"n{at}", role=role, peak=1, samples=samples) for at, role in enumerate(roles))
    figure = Figure()
    draw_memory(figure, made("memory_sampled", 2.0, nodes=nodes), 0.0)
    colours = [line.get_color() for line in figure.axes[0].get_lines()]
    assert len(set(colours)) == len(roles)


def test_many_events_are_marked_without_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr("holdfast.cli.history.report_plot.save_figure", lambda figure, *_: drawn.append(figure))
    events: list[AnyEvent] = [made("job_started")]
    for number in range(1, 41):
        events += [made("failure_detected", number - 0.5, node=f"node-{number}"), step(number, float(number))]
    plot_events(events, tmp_path / "plot.png")
    throughput, *others = drawn[0].axes
    assert not throughput.texts
    names = [text.get_text() for text in throughput.get_legend().get_texts()]
    assert names == ["all nodes together, mean of 8 steps", "failures, waits"]
    assert len(throughput.collections[0].get_segments()) == 40
    assert not [axes for axes in others if axes.collections]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "fields",
    [
        {"loss": None},
        {"loss": 1e308},
        {"samples": 0},
        {"step_s": 0.0},
        {"world_size": 0},
        {"job": "$a_{"},
    ],
)
def test_steps_with_extreme_or_missing_values_can_be_plotted(fields: dict[str, Any], tmp_path: Path) -> None:
    generation = made("generation_started", 0.5, members=(), world_size=0)
    plot_events([made("job_started"), generation, step(1, 1.0, **fields), step(2, 2.0, **fields)], tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 0


def test_a_report_of_a_job_without_events_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.cli.history.report.read_job_events", lambda *_: iter(()))
    result = CliRunner().invoke(app, ["report"])
    assert isinstance(result.exception, BadInputError)
    assert "no event yet" in str(result.exception)
