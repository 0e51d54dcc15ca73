"""Tests that an interrupted calibration keeps its measurements and gives the reason."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import toml

from holdfast.cli.pool import calibrate
from holdfast.control.client import SilentError
from holdfast.coordination.pool.plans.paces import declared_pace, merge_pace
from holdfast.errors import UnreachableError
from holdfast.protocol.job_spec import CheckpointSpec, JobSpec, OutputSpec
from holdfast.protocol.layouts.layout import Layout
from holdfast.protocol.layouts.layout_list import ListedLayout, places_by_nodes
from holdfast.protocol.pool.sharing import JobPace


class Client:
    """A pool's interface: after `looks` queries, it returns or raises `then`."""

    def __init__(self, looks: int, then: dict[str, Any] | BaseException) -> None:
        self._looks, self._then = looks, then
        self.most = 0
        self.stopped: list[str] = []

    def submit(self, spec: JobSpec) -> int:
        return 7

    def update(self, name: str, changes: dict[str, Any]) -> None:
        self.most = changes["max_nodes"]

    def status(self) -> dict[str, Any]:
        return {"nodes": [], "reserve": 0}

    def job(self, name: str) -> dict[str, Any]:
        self._looks -= 1
        if self._looks >= 0:
            step_s = {str(nodes): 8.0 / nodes for nodes in range(1, self.most + 1)}
            pace = {"step_s": step_s, "micro_batches": 8, "samples": 8, "flop_per_sample": 6e9}
            return {"submission": 7, "state": "admitted", "why": "", "nodes": ["n1"], "pace": pace}
        if isinstance(self._then, KeyboardInterrupt) and self._looks < -1:
            return WAITS  # the user presses Ctrl-C only once
        if isinstance(self._then, BaseException):
            raise self._then
        return self._then

    def stop(self, name: str) -> None:
        self.stopped.append(name)


OVER = {"submission": 7, "state": "failed", "why": "no node is left", "nodes": [], "pace": None}
WAITS = {"submission": 7, "state": "queued", "why": "it needs 1 node", "nodes": [], "pace": None}
ANOTHER = {"submission": 8, "state": "admitted", "why": "", "nodes": [], "pace": None}


def measured(client: Client) -> tuple[dict[str, Any], str]:
    spec = JobSpec(name="one")
    return calibrate._measure(client, spec, (1, 4), 0.5, print_status=lambda _: None)  # pyright: ignore


@pytest.mark.parametrize(
    ("then", "why"),
    [
        (OVER, "one is over: failed: no node is left"),
        (WAITS, "no steps with 3 nodes were measured within 0.5 s: it needs 1 node"),
        (ANOTHER, "one is another job by now"),
        (UnreachableError("nobody answers at http://gone"), "nobody answers at http://gone"),
        (KeyboardInterrupt(), "it was interrupted"),
    ],
)
def test_an_interrupted_calibration_keeps_earlier_measurements(then: dict[str, Any] | BaseException, why: str) -> None:
    client = Client(2, then)
    found, said = measured(client)
    assert said == why
    assert found["step_s"] == {"1": 8.0, "2": 4.0}
    assert calibrate._document(found, 4) == {"step_s": [8.0, 4.0], "micro_batches": 8, "samples": 8, "places": []}  # pyright: ignore
    waits = then is WAITS or isinstance(then, KeyboardInterrupt)
    assert bool(client.stopped) == waits, "only a job that still waits is stopped"


class BeingStartedAgain(Client):
    """Its server is unreachable at the first request of each kind."""

    def __init__(self) -> None:
        super().__init__(100, OVER)
        self._asked = set[int]()

    def update(self, name: str, changes: dict[str, Any]) -> None:
        if changes["max_nodes"] not in self._asked:
            self._asked.add(changes["max_nodes"])
            raise SilentError("no pool answers")
        super().update(name, changes)


def test_calibration_continues_after_the_pool_server_restarts() -> None:
    found, why = measured(BeingStartedAgain())
    assert not why
    assert found["step_s"].keys() == {"1", "2", "3", "4"}


class SlowerWithTwo(Client):
    """A pool that plans by throughput: with two nodes the job is slower, so it receives no third one."""

    def __init__(self, idle: int, reserve: int = 0) -> None:
        super().__init__(100, OVER)
        self.has, self.sizes, self._idle, self._reserve = 1, list[int](), idle, reserve

    def update(self, name: str, changes: dict[str, Any]) -> None:
        super().update(name, changes)
        self.sizes = list(changes["sizes"])
        self.has = self.sizes[0] if self.sizes else min(self.most, 2)

    def status(self) -> dict[str, Any]:
        node = {"here": True, "job": "", "drained": False, "standby": False}
        return {"nodes": [node] * self._idle, "reserve": self._reserve}

    def job(self, name: str) -> dict[str, Any]:
        pace = {"step_s": {str(n): float(n) for n in range(1, self.has + 1)}, "micro_batches": 8, "samples": 8}
        nodes = [f"n{number}" for number in range(self.has)]
        return {"submission": 7, "state": "admitted", "why": "", "nodes": nodes, "pace": pace}


def test_calibration_continues_after_a_slower_number_of_nodes() -> None:
    client = SlowerWithTwo(idle=2)
    found, why = measured(client)
    assert (why, found["step_s"].keys()) == ("", {"1", "2", "3", "4"})
    assert client.sizes == [4], "the job asks for exactly this number"


@pytest.mark.parametrize(("idle", "reserve"), [(0, 0), (1, 1)])
def test_calibration_does_not_request_used_or_reserved_nodes(idle: int, reserve: int) -> None:
    client = SlowerWithTwo(idle, reserve)
    found, why = measured(client)
    assert found["step_s"].keys() == {"1", "2"}
    assert why == "no steps with 3 nodes were measured within 0.5 s: it has 2 nodes"
    assert client.sizes == []


def test_an_uninterrupted_calibration_measures_every_number_of_nodes() -> None:
    client = Client(100, OVER)
    found, said = measured(client)
    assert said == ""
    assert len(found["step_s"]) == 4
    assert client.stopped == ["one"]


def test_the_output_is_valid_job_file_text_with_the_counted_flop() -> None:
    found, _ = measured(Client(100, OVER))
    written = calibrate._toml(calibrate._document(found, 4), calibrate._counted(found, OutputSpec()))  # pyright: ignore
    read = toml.decode(written, type=JobSpec)
    assert read.pace.step_s == (8.0, 4.0, 2.666667, 2.0)
    assert read.output.flop_per_sample == 6e9


def test_flop_declared_by_the_job_are_not_written_again() -> None:
    found, _ = measured(Client(100, OVER))
    assert calibrate._counted(found, OutputSpec(flop_per_sample=1e9)) == {}  # pyright: ignore


def test_no_flop_are_written_if_none_were_counted() -> None:
    assert "flop" not in calibrate._toml(calibrate._document({}, 4), calibrate._counted({}, OutputSpec()))  # pyright: ignore


def test_the_measured_copy_uses_none_of_the_jobs_files() -> None:
    output = OutputSpec(
        events="/kept/events.jsonl", metrics_file="/kept/m.csv", log_dir="/kept", alert="page-me", flop_per_sample=6e9
    )
    job = JobSpec(name="one", checkpoint=CheckpointSpec(dir="/kept", snapshot_every=5), output=output, weight=2.0)
    copy = calibrate._job_to_measure(job, 3)  # pyright: ignore
    assert "/kept" not in repr(copy)
    assert copy.output == OutputSpec(flop_per_sample=6e9)
    assert copy.name != job.name


def test_the_workers_per_replica_are_written_for_each_number_of_nodes() -> None:
    layouts = [{"nodes": 1, "places": 4}, {"nodes": 3, "places": 2}]
    found = {"step_s": {"1": 2.0, "2": 1.5, "4": 1.0}, "micro_batches": 6, "samples": 6, "layouts": layouts}
    document = calibrate._document(found, 4)  # pyright: ignore
    pace = toml.decode(calibrate._toml(document, {}), type=JobSpec).pace  # pyright: ignore
    assert pace.places == (4, 4, 2, 2)
    known = declared_pace(JobSpec(name="one", pace=pace))
    assert known is not None
    assert places_by_nodes(known.layouts) == (4, 4, 2)


def test_measurements_under_another_layout_are_discarded() -> None:
    before = JobPace(step_s={1: 4.0, 3: 1.0}, layouts=(ListedLayout(layout=Layout(shard=2), nodes=1),))
    four = ListedLayout(layout=Layout(shard=4), nodes=1)
    now = JobPace(step_s={2: 2.0}, layouts=(four, ListedLayout(layout=Layout(shard=2), nodes=3)))
    assert merge_pace(before, now, None).step_s == {2: 2.0, 3: 1.0}
