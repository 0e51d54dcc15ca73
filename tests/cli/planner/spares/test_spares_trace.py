"""Tests of reading traces: three layouts, their errors, and real traces."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from holdfast.cli.planner.spares.trace import read_trace
from holdfast.errors import BadInputError
from holdfast.planner.reliability.sparing.reference import catalina
from holdfast.planner.reliability.traces.consequence import fitted_failures, implied_interruptions
from holdfast.planner.reliability.traces.fit import fit_trace
from holdfast.planner.reliability.traces.interruptions import count_interruptions
from places import RECORDED

REAL = RECORDED / "failures"


def read(path: Path, text: str, **options):
    path.write_text(text)
    return read_trace(path, **{"nodes": None, "hours": None, "system": None, "merge_overlaps": False, **options})


def test_a_trace_of_outages_is_read(tmp_path: Path) -> None:
    text = "start_s,end_s,node\n0,3600,a\n7200,14400,b\n"
    trace = read(tmp_path / "t.csv", text, nodes=10)
    assert trace.nodes == 10
    assert trace.span_hours == 4.0
    assert trace.start_hours.tolist() == [0.0, 2.0]
    assert trace.repair_hours.tolist() == [1.0, 2.0]
    assert trace.node_hours_up == 40.0 - 3.0


def test_a_trace_with_unix_times_begins_at_its_first_event(tmp_path: Path) -> None:
    """Such a log of half a year once counted as 54 years without a failure."""
    at = 1_700_000_000
    text = f"start_s,end_s,node\n{at},{at + 3600},a\n{at + 7200},{at + 14400},b\n"
    trace = read(tmp_path / "t.csv", text, nodes=10)
    assert (trace.span_hours, trace.start_hours.tolist(), trace.began_unix_s) == (4.0, [0.0, 2.0], at)
    earlier = read(tmp_path / "t.csv", text, nodes=10, since="2023-11-14T21:13:20")
    assert (earlier.span_hours, earlier.start_hours.tolist()) == (5.0, [1.0, 3.0])
    assert read(tmp_path / "t.csv", text, nodes=10, since=str(at - 3600)).span_hours == 5.0
    first = r"is after the first failure, at 2023-11-14T22:13:20Z \(1700000000 s by the log's clock\)"
    with pytest.raises(BadInputError, match=first):
        read(tmp_path / "t.csv", text, nodes=10, since="2023-11-15")
    for odd in ("1700000000000,1700000300000", "1700000000,1700000300000"):
        with pytest.raises(BadInputError, match=r"line 2: .*_s = 17.* is too large for seconds: milliseconds"):
            read(tmp_path / "ms.csv", f"start_s,end_s,node\n{odd},a\n", nodes=10)
    dates = "start_s,end_s,node\n2023-11-14T22:13:20,2023-11-14T23:13:20Z,a\n2023-11-15 00:13:20,,b\n"
    written = read(tmp_path / "t.csv", dates, nodes=10, hours=4.0)
    assert (written.start_hours.tolist(), written.began_unix_s) == ([0.0, 2.0], at)
    assert written.ended.tolist() == [True, False], "an empty end: the repair has not ended"


def test_a_trace_with_relative_times_begins_at_the_given_time(tmp_path: Path) -> None:
    text = "start_s,end_s,node\n7200,10800,a\n14400,18000,b\n"
    assert read(tmp_path / "t.csv", text, nodes=2).span_hours == 3.0
    trace = read(tmp_path / "t.csv", text, nodes=2, since="0")
    assert (trace.span_hours, trace.began_unix_s) == (5.0, None)
    for since, message in (
        ("7201", "is after the first failure, at 7200 s"),
        ("yesterday", "must be a date such as 2025-01-31, or seconds"),
        ("2025-01-31", "the log's times are not dates: give the seconds by its clock"),
    ):
        with pytest.raises(BadInputError, match=f"--from {since}: {message}"):
            read(tmp_path / "t.csv", text, nodes=2, since=since)


def test_columns_can_be_renamed_and_give_racks_and_scopes(tmp_path: Path) -> None:
    text = "host,from,to,rack,what\na,0,60,r1,node\nb,30,90,r1,rack\nc,7200,7300,r2,node\n"
    columns = ("node=host", "start=from", "end=to")
    trace = read(tmp_path / "t.csv", text, nodes=3, columns=columns)
    assert trace.rack_of.tolist() == [0, 0, 1]
    assert trace.rack_lines == frozenset()
    assert read(tmp_path / "t.csv", text, nodes=3, columns=(*columns, "scope=what")).rack_lines == {3}
    for wrong, message in (
        (("host=node",), "--map host=node: must be KEY=COLUMN, with a key of start, end, node, rack, scope"),
        (("node=",), "--map node=: must be KEY=COLUMN"),
        (("node=gone",), "--map node=gone: the file has no column gone"),
        ((*columns, "end=from"), "--map end=from: end is mapped to to already"),
        ((*columns, "scope=rack"), "line 2: rack = 'r1' must be rack or node"),
    ):
        with pytest.raises(BadInputError, match=message):
            read(tmp_path / "t.csv", text, nodes=3, columns=wrong)
    with pytest.raises(BadInputError, match="line 3: node a was in rack r1 before"):
        read(tmp_path / "t.csv", "start_s,end_s,node,rack\n0,1,a,r1\n5,6,a,r2\n", nodes=2)
    with pytest.raises(BadInputError, match="--map: is for files with one line per failure"):
        read(tmp_path / "t.csv", "seconds,event,node\n0,add,a\n", nodes=2, columns=("node=node",))


def test_a_trace_of_events_with_unfinished_repairs_is_read(tmp_path: Path) -> None:
    text = "seconds,event,node\n0,add,a\n0,add,b\n3600,remove,a\n7200,add,a\n10800,remove,b\n18000,remove,a\n"
    trace = read(tmp_path / "t.csv", text)
    assert trace.nodes == 2
    assert trace.ended.tolist() == [True, False, False]
    assert trace.repair_hours.tolist() == [1.0]
    assert trace.node_hours_up == 10.0 - 1.0 - 2.0


def test_one_system_of_a_gzipped_trace_is_selected(tmp_path: Path) -> None:
    text = "start_s_since_1996,system,node,system_nodes,repair_min\n-3600,1,0,8,60\n0,2,0,4,60\n3600,2,1,4,120\n"
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress(text.encode()))
    trace = read_trace(path, nodes=None, hours=None, system=2, merge_overlaps=False)
    assert trace.nodes == 4
    assert trace.start_hours.tolist() == [0.0, 1.0]
    assert trace.span_hours == 3.0
    for system, message in ((None, "several systems"), (9, "no system 9; it has 1, 2")):
        with pytest.raises(BadInputError, match=message):
            read_trace(path, nodes=None, hours=None, system=system, merge_overlaps=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "has the columns a, b; needed are"),
        ("", "has the columns none"),
        ("start_s,end_s,node\n0,1,a\n5,6,b\n", "give --nodes"),
        ("start_s,end_s,node\n0,x,a\n", "line 2: end_s = 'x' must be a number"),
        ("start_s,end_s,node\n0,inf,a\n", "line 2: end_s = inf must be finite"),
        ("start_s,end_s,node\n0\n", "line 2: has 1 cells where the header has 3"),
        ("start_s,end_s,node\n0,1\n", "line 2: has 2 cells where the header has 3"),
        ("start_s,end_s,node\n0,1,a,b\n", "line 2: has more cells where the header has 3"),
        ("start_s_since_1996,system,node,system_nodes,repair_min\n0,2,0,4,60\n67\n", "line 3: has 1 cells"),
        ("start_s,end_s,node\n0,1,a\rb\n", "line 2: not CSV"),
        ("start\r_s,end_s,node\n0,1,a\n", "line 1: not CSV"),
        ("x" * 1000 + ",b\n1,2\n", "has the columns b, x{20,200}[.]{3}; needed are"),
        ("seconds,event,node\n0,add,a\n5,remove,a\n4,add,a\n", "line 4: seconds = 4 is before"),
        ("seconds,event,node\n0,add,a\n5,lost,a\n", 'line 3: event = .lost. .* must be "add" or "remove"'),
        ("seconds,event,node\n0,add,a\n5,add,a\n", "line 3: event = .add. of node a does not change"),
        ("seconds,event,node\n0,add,a\n5,remove,a\n", "1 failures, and 2 are the least"),
    ],
)
def test_invalid_traces_are_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BadInputError, match=message) as error:
        read(tmp_path / "t.csv", text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("cut", [slice(0, -12), slice(0, 20)])
def test_a_damaged_gzipped_trace_is_refused(tmp_path: Path, cut: slice) -> None:
    path = tmp_path / "t.csv.gz"
    whole = gzip.compress(b"start_s,end_s,node\n0,3600,a\n7200,14400,b\n" * 10)
    path.write_bytes(whole[cut] + b"\xff" * 40)
    with pytest.raises(BadInputError, match="cannot be read"):
        read_trace(path, nodes=2, hours=None, system=None, merge_overlaps=False)


def test_a_byte_order_mark_is_not_part_of_the_first_column(tmp_path: Path) -> None:
    trace = read(tmp_path / "t.csv", "\ufeffstart_s,end_s,node\n0,3600,a\n7200,14400,b\n", nodes=10)
    assert trace.start_hours.tolist() == [0.0, 2.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 10**400}, r"nodes = 10{19}[.]{3}: must lie between 1 and 10,000,000"),
        ({"nodes": 2, "hours": 1e15}, "span_hours = 1e[+]15: must be at most 1,000,000"),
    ],
)
def test_implausible_numbers_of_nodes_and_hours_are_refused(
    tmp_path: Path, options: dict[str, float], message: str
) -> None:
    with pytest.raises(BadInputError, match=message):
        read(tmp_path / "t.csv", "start_s,end_s,node\n0,3600,a\n7200,14400,b\n", **options)


def test_unsorted_and_unmerged_overlapping_outages_are_refused(tmp_path: Path) -> None:
    unsorted = "start_s,end_s,node\n7200,14400,b\n0,3600,a\n"
    with pytest.raises(BadInputError, match=r"line 3: .*sort by start"):
        read(tmp_path / "t.csv", unsorted, nodes=2)
    overlapping = "start_s,end_s,node\n0,7200,a\n3600,10800,a\n20000,20001,b\n"
    with pytest.raises(BadInputError, match=r"line 3: .*overlaps the repair of the same node from line 2"):
        read(tmp_path / "t.csv", overlapping, nodes=2)
    trace = read(tmp_path / "t.csv", overlapping, nodes=2, merge_overlaps=True)
    assert trace.repair_hours.tolist() == pytest.approx([3.0, 1 / 3600])


def test_a_system_is_refused_if_the_trace_has_no_systems(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="no column system"):
        read(tmp_path / "t.csv", "start_s,end_s,node\n0,1,a\n", system=3)


def real(name: str) -> Path:
    path = REAL / name
    if not path.exists():
        pytest.skip(f"{path} is not here: the real traces are not part of the project")
    return path


def test_real_accelerator_failures_are_bursty_with_heavy_tailed_repairs() -> None:
    path = real("stepfun_infinitehbd_faults.csv")
    with pytest.raises(BadInputError, match=r"line 405: .*overlaps .* line 317"):
        read_trace(path, nodes=400, hours=None, system=None, merge_overlaps=False)
    trace = read_trace(path, nodes=400, hours=None, system=None, merge_overlaps=True, since="0")
    fit = fit_trace(trace)
    # The data's own notes: 4.18 faults per 1000 node-days, mean repair 132.8 h, gap CV 1.76.
    assert 24_000 * fit.failures / (fit.nodes * fit.span_hours) == pytest.approx(4.18, rel=0.01)
    assert fit.mttr_hours.mean == pytest.approx(132.8, rel=0.02)
    assert fit.gaps.cv == pytest.approx(1.76, rel=0.02)
    assert fit.repairs.ks_p_value < 0.01
    assert fit.repairs.weibull.shape < 0.6
    assert fit.weekly_dispersion > 2


def test_real_events_and_outages_give_the_same_repair_times() -> None:
    outages = read_trace(
        real("stepfun_infinitehbd_faults.csv"), nodes=400, hours=None, system=None, merge_overlaps=True
    )
    events = read_trace(
        real("stepfun_infinitehbd_events.csv"), nodes=None, hours=None, system=None, merge_overlaps=False
    )
    assert events.nodes == 400
    # The events omit outages of zero length.
    longer = outages.repair_hours > 0
    np.testing.assert_allclose(np.sort(events.repair_hours), np.sort(outages.repair_hours[longer]), atol=1e-3)


def test_repairs_of_a_real_hpc_system_fit_a_lognormal_best() -> None:
    trace = read_trace(real("lanl_1996_2005.csv.gz"), nodes=None, hours=None, system=18, merge_overlaps=True)
    fit = fit_trace(trace)
    assert fit.nodes == 1024
    assert 24_000 * fit.failures / (fit.nodes * fit.span_hours) == pytest.approx(3.2, rel=0.02)
    assert fit.repairs.lognormal_aic < fit.repairs.weibull_aic < 0


def test_the_fit_of_a_real_hpc_system_keeps_its_interruptions() -> None:
    """Only 35 % of them once remained, because a third of the node failures counted as rack failures."""
    trace = read_trace(real("lanl_1996_2005.csv.gz"), nodes=None, hours=None, system=20, merge_overlaps=True)
    found, case = count_interruptions(trace), catalina()
    assert 0.95 < found.total / trace.start_hours.size <= 1.0
    failures = fitted_failures(case, trace, fit_trace(trace), found, 1.0)
    trays_per_rack = case.cluster.gpus_per_rack // case.cluster.gpus_per_tray
    implied = implied_interruptions(case.cluster, failures, trace.node_hours_up / trays_per_rack)
    assert implied == pytest.approx(found.total)
