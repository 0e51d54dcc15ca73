"""Metrics follow the events, and have their own registry."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from holdfast.observability.journal_file import FileJournal
from holdfast.observability.metrics import Metrics, Slowness
from holdfast.protocol import events as ev
from made_events import joined, made
from places import ROOT


def _values(metrics: Metrics) -> dict[str, float]:
    families = text_string_to_metric_families(metrics.exposition().decode())
    return {
        "/".join(
            [sample.name, *(value for label, value in sample.labels.items() if label not in ("job_name", "le"))]
        ): sample.value
        for family in families
        for sample in family.samples
        if sample.labels["job_name"] == "j" and "_bucket" not in sample.name
    }


def _stamp(seq: int, generation: int) -> dict[str, Any]:
    return {"time": 1.0, "job": "j", "term": 3, "generation": generation, "seq": seq}


def test_the_newest_generation_is_reported_while_none_is_active() -> None:
    metrics = Metrics("j")
    metrics.observe(ev.GenerationStarted(**_stamp(1, 4), members=("a",), world_size=1, reason="start"))
    metrics.observe(ev.RolledBack(**_stamp(2, 0), to_step=0, why="all workers have died"))
    assert _values(metrics)["holdfast_generation"] == 4


def test_metrics_follow_the_events() -> None:
    metrics = Metrics("j")
    metrics.observe(ev.GenerationStarted(**_stamp(1, 1), members=("a", "b"), world_size=4, reason="start"))
    for step in (1, 2):
        metrics.observe(
            ev.StepCommitted(**_stamp(step + 1, 1), step=step, loss=2.0 / step, samples=32, world_size=4, step_s=0.25)
        )
    metrics.observe(
        ev.FailureDetected(**_stamp(4, 1), node="a", kind="hang", detector="timeout", severity=1, after_s=1.0)
    )
    metrics.observe(ev.GenerationStarted(**_stamp(5, 2), members=("b",), world_size=2, reason="failure"))
    metrics.observe(
        ev.Recovered(
            **_stamp(6, 2),
            action="shrink",
            state_source="live",
            moved_bytes=7,
            detect_s=0.0,
            decide_s=0.0,
            regroup_s=0.0,
            transfer_s=0.0,
            redo_s=0.0,
            down_s=0.5,
        )
    )
    metrics.observe(ev.NodeLeft(**_stamp(7, 2), node="a", reason="failed"))
    metrics.observe(joined("c", **_stamp(8, 2)))
    metrics.observe(ev.Rebalanced(**_stamp(9, 2), step=2, moved_bytes=5, experts_moved=1, transfer_s=0.0, down_s=0.1))
    metrics.observe(ev.CheckpointSaved(**{**_stamp(10, 2), "time": 90.5}, step=2, save_s=0.1, saved_bytes=9))
    metrics.set_connected_agents(3)
    metrics.slowness = lambda: Slowness(worker=1.25, link=2.5, slow={"compute": 2})
    metrics.count_refused_message()
    values = _values(metrics)
    expected = {
        "holdfast_step": 2,
        "holdfast_loss": 1.0,
        "holdfast_world_size": 2,
        "holdfast_nodes/training": 1,
        "holdfast_nodes/waiting": 1,
        "holdfast_term": 3,
        "holdfast_generation": 2,
        "holdfast_agent_connections": 3,
        "holdfast_slowest_worker_ratio": 1.25,
        "holdfast_slowest_link_ratio": 2.5,
        "holdfast_slow_total/compute": 2,
        "holdfast_steps_committed_total": 2,
        "holdfast_samples_committed_total": 64,
        "holdfast_messages_refused_total": 1,
        "holdfast_skipped_steps_total": 0,
        "holdfast_failures_total/hang/1": 1,
        "holdfast_recoveries_total/shrink/live": 1,
        "holdfast_step_duration_seconds_count": 2,
        "holdfast_step_duration_seconds_sum": 0.5,
        "holdfast_recovery_down_seconds_sum": 0.5,
        "holdfast_moved_bytes_total/recovery": 7,
        "holdfast_moved_bytes_total/rebalance": 5,
        "holdfast_last_checkpoint_timestamp_seconds": 90.5,
    }
    assert {name: values.get(name) for name in expected} == expected


def test_the_page_lists_exactly_the_existing_metrics() -> None:
    page = (ROOT / "docs" / "events.md").read_text()
    documented = set(re.findall(r"`(holdfast_\w+?)(?:_total)?(?:\{[\w,]+\})?`", page))
    assert documented == {family.name for family in Metrics("j").registry.collect()}


def test_metrics_from_a_journal_equal_those_from_live_events(tmp_path: Path) -> None:
    """The metrics from a journal equal those from the live events."""
    events: list[ev.AnyEvent] = [
        made("job_started", 1.0, seq=1, job="j", term=1, flop_per_sample=2.0),
        made("generation_started", 5.0, seq=2, job="j", members=("a",), world_size=1, reason="start"),
        *(made("step_committed", 5.0 + k, seq=2 + k, job="j", step=k, samples=8, step_s=1.0) for k in range(1, 9)),
        made("failure_detected", 13.5, seq=11, job="j", node="a", kind="hang", severity=3),
        made("recovered", 14.5, seq=12, job="j", action="retry", state_source="none", down_s=1.0),
        made("checkpoint_saved", 15.0, seq=13, job="j"),
    ]
    with contextlib.closing(FileJournal(tmp_path / "e.jsonl")) as journal:
        before = Metrics("j")
        for event in events:
            journal.append(event)
            before.observe(event)
    after = Metrics("j")
    FileJournal(tmp_path / "e.jsonl", on_existing=after.observe).close()
    assert after.exposition(99.0) == before.exposition(99.0)
    values = _values(after)
    assert values["holdfast_steps_committed_total"] == 8
    assert values["holdfast_time_seconds_total/waiting"] == 4.0
    assert values["holdfast_flop_delivered"] == 128.0


def test_unknown_metrics_have_no_value() -> None:
    unknown = {"holdfast_loss", "holdfast_goodput_ratio", "holdfast_mfu_ratio", "holdfast_flop_delivered"}
    assert not unknown & _values(Metrics("j")).keys()


def test_lost_steps_are_counted_from_the_journals_repair_event() -> None:
    metrics = Metrics("j")
    metrics.observe(made("journal_repaired", 9.0, job="j", from_step=3, to_step=10, step_samples=8, samples=80))
    values = _values(metrics)
    assert (values["holdfast_step"], values["holdfast_steps_committed_total"]) == (10, 7)
    assert values["holdfast_samples_committed_total"] == 56


def test_metrics_are_not_added_to_the_global_registry() -> None:
    metrics, other = Metrics("j"), Metrics("j")
    metrics.count_refused_message()
    assert _values(metrics)["holdfast_messages_refused_total"] == 1
    assert _values(other)["holdfast_messages_refused_total"] == 0
    assert REGISTRY.get_sample_value("holdfast_messages_refused_total", {"job_name": "j"}) is None
