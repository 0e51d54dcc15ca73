"""Availability traces: parsing, rejected lines with their numbers, and the window of a job."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import PROPERTY, ROUTING

from holdfast.errors import BadInputError
from holdfast.planning.availability import HEADER, NodeEvent, parse_trace, select_window

SPOT = ROUTING.parent / "spot"
HEAD = "seconds,event,node\n"


@st.composite
def rows(draw: st.DrawFn) -> list[tuple[float, bool, str]]:
    """Draw a valid trace of (seconds, add, node), with a node present at 0."""
    present: set[str] = set()
    found: list[tuple[float, bool, str]] = []
    second = 0.0
    for _ in range(draw(st.integers(1, 30))):
        node = draw(st.sampled_from("abcdef"))
        found.append((second, node not in present, node))
        present ^= {node}
        if present:
            second += draw(st.sampled_from((0.0, 0.5, 60.0)))
    return found


def as_text(events: list[tuple[float, bool, str]]) -> str:
    return HEAD + "".join(f"{at:g},{'add' if add else 'remove'},{node}\n" for at, add, node in events)


def present_at(events: list[tuple[float, bool, str]], second: float) -> set[str]:
    """Return the present nodes, by brute force."""
    there: set[str] = set()
    for at, add, node in events:
        if at <= second:
            (there.add if add else there.discard)(node)
    return there


@PROPERTY
@given(rows())
def test_a_written_trace_is_read_unchanged(events: list[tuple[float, bool, str]]) -> None:
    read = parse_trace(as_text(events))
    assert [(e.seconds, e.add, e.node) for e in read] == events
    assert [e.line for e in read] == list(range(2, len(events) + 2))


@PROPERTY
@given(rows(), st.sampled_from((0.0, 0.5, 61.0, 120.0)), st.sampled_from((None, 0.5, 60.0, 200.0)))
def test_a_window_contains_the_trace(events: list[tuple[float, bool, str]], begin: float, end: float | None) -> None:
    last = events[-1][0] if end is None else end
    if last < begin or not present_at(events, begin):
        with pytest.raises(BadInputError):
            select_window(parse_trace(as_text(events)), begin=begin, end=end)
        return
    window = select_window(parse_trace(as_text(events)), begin=begin, end=end)
    assert set(window.start_nodes) == present_at(events, begin)
    assert window.seconds == last - begin
    moments = [batch.seconds for batch in window.batches]
    assert moments == sorted(set(moments))
    assert all(0 < moment <= window.seconds for moment in moments)
    there = set(window.start_nodes)
    for batch in window.batches:
        for event in batch.events:
            assert event.add == (event.node not in there)
            there ^= {event.node}
        assert there == present_at(events, begin + batch.seconds)
    assert window.names >= there


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "line 1: the header is ''"),
        ("seconds,nodes\n0,4\n", "line 1: the header is 'seconds,nodes'"),
        ("0,add,a\n", "line 1: the header is '0,add,a'"),
        (HEAD, "the trace has only a header"),
        (HEAD + "soon,add,a\n", "line 2: seconds is 'soon'"),
        (HEAD + "0,add," + "a" * 200_000, "line 2: it is not CSV: field larger than field limit"),
        (HEAD + "nan,add,a\n", "line 2: seconds is nan"),
        (HEAD + "inf,add,a\n", "line 2: seconds is inf"),
        (HEAD + "-1,add,a\n", "line 2: seconds is -1"),
        (HEAD + "5,add,a\n4,add,b\n", "line 3: 4 s come after 5 s"),
        (HEAD + "0,add,a\n1,pause,a\n", "line 3: the event is 'pause'"),
        (HEAD + "0,add,a\n1,remove,b\n", "line 3: b is removed, but it is not there"),
        (HEAD + "0,add,a\n1,remove,a\n2,remove,a\n", "line 4: a is removed, but it is not there"),
        (HEAD + "0,add,a\n1,add,a\n", "line 3: a is added, but it is there already"),
        (HEAD + "0,add,../a\n", "line 2: the node is '../a'"),
        (HEAD + "0,add\n", "line 2: there are 2 fields"),
    ],
)
def test_an_invalid_line_is_reported_with_its_rule(text: str, says: str) -> None:
    with pytest.raises(BadInputError) as caught:
        parse_trace(text)
    assert says in str(caught.value)


def test_blank_lines_spaces_and_a_byte_order_mark_do_no_harm() -> None:
    read = parse_trace("\ufeffseconds, event, node\n\n0, add, a\n\n1, remove, a\n")
    assert read[-1] == NodeEvent(seconds=1.0, add=False, node="a", line=5)


def test_a_begin_without_nodes_is_refused_with_one_that_works() -> None:
    trace = parse_trace(HEAD + "108,add,a\n109,remove,a\n")
    with pytest.raises(BadInputError, match="no node is there at 0 s: give --from 108"):
        select_window(trace)
    assert select_window(trace, begin=108).start_nodes == ("a",)
    with pytest.raises(BadInputError, match="another --from"):
        select_window(trace, begin=109)


def test_a_node_may_be_replaced_within_a_moment() -> None:
    window = select_window(parse_trace(HEAD + "0,add,a\n5,remove,a\n5,add,a\n"))
    assert [[event.add for event in batch.events] for batch in window.batches] == [[False, True]]


@pytest.mark.skipif(not SPOT.is_dir(), reason=f"the recorded traces are not there: {SPOT}")
@pytest.mark.parametrize("path", sorted(SPOT.glob("*.csv")), ids=lambda path: path.stem)
def test_all_recorded_traces_are_read(path: Path) -> None:
    text = path.read_text()
    if path.stem.endswith("_counts"):
        with pytest.raises(BadInputError, match="the header"):
            parse_trace(text)
        return
    events = parse_trace(text)
    assert len(events) == text.count("\n") - text.startswith(",".join(HEADER))
    assert all(math.isfinite(event.seconds) for event in events)
    window = select_window(events, begin=events[0].seconds)
    assert window.start_nodes


@pytest.mark.skipif(not SPOT.is_dir(), reason=f"the recorded traces are not there: {SPOT}")
def test_the_80_minutes_of_the_paper() -> None:
    window = select_window(parse_trace((SPOT / "lazarus_p3_80min_cap10.csv").read_text()), end=4800)
    assert len(window.start_nodes) == 9
    changes = [(b.seconds / 60, sum(1 if e.add else -1 for e in b.events)) for b in window.batches]
    assert changes == [(1, 1), (34, -4), (43, 4), (51, -3), (59, -1), (61, 4), (77, -1)]
