"""The event contract: other tools read these names. Fields may be added; none may change or go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from holdfast.protocol.events import AnyEvent, JobStarted, StepCommitted

CONTRACT = {
    "job_started": {"url", "coordinator_pid"},
    "node_joined": {"node", "agent_pid", "worker_pids"},
    "workers_changed": {"node", "worker_pids"},
    "node_left": {"node", "reason"},
    "epoch_started": {"members", "world", "reason", "expert_moves", "fault_threshold"},
    "step_committed": {"step", "loss", "samples", "world", "seconds", "skipped"},
    "failure_detected": {"node", "kind", "after_s"},
    "recovered": {
        "action",
        "state_source",
        "bytes_moved",
        "detect_s",
        "regroup_s",
        "transfer_s",
        "redo_s",
        "down_s",
        "experts_moved",
    },
    "rebalance_decided": {"step", "adopted", "gain_s", "cost_s", "moves", "why"},
    "rebalanced": {"step", "bytes_moved", "experts_moved", "transfer_s", "down_s"},
    "rolled_back": {"to_step", "why"},
    "checkpoint_saved": {"step", "seconds", "bytes"},
    "job_finished": {"steps", "samples", "final_loss"},
}
COMMON = {"time", "job", "term", "epoch", "seq"}
EVENTS = {kind.__struct_config__.tag: kind for kind in get_args(AnyEvent)}


@pytest.mark.parametrize("name", CONTRACT)
def test_the_contract_holds(name: str) -> None:
    fields = set(EVENTS[name].__struct_fields__)
    assert fields >= CONTRACT[name] | COMMON


@pytest.mark.parametrize("name", EVENTS)
def test_every_event_and_field_is_documented(name: str) -> None:
    page = (Path(__file__).parent.parent / "docs" / "events.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
    missing = [field for field in EVENTS[name].__struct_fields__ if field not in COMMON and f"`{field}`" not in row]
    assert missing == []


def test_an_event_is_one_flat_json_object() -> None:
    event = StepCommitted(
        time=1.5, job="j", term=1, epoch=2, seq=3, step=4, loss=0.1 + 0.2, samples=32, world=4, seconds=0.25
    )
    line = json.loads(msgspec.json.encode(event))
    assert line["event"] == "step_committed"
    assert line["loss"] == 0.1 + 0.2, "the loss is in full precision"
    assert set(line) == COMMON | CONTRACT["step_committed"] | {"event"}


def test_a_loss_that_is_no_number_is_null() -> None:
    started = JobStarted(time=float("nan"), job="j", term=1, epoch=0, url="u", coordinator_pid=1)
    assert json.loads(msgspec.json.encode(started))["time"] is None
