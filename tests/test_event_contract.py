"""The event contract: other tools read these names. Fields may be added, but not changed or removed."""

from __future__ import annotations

import json
import re

import msgspec
import pytest

from holdfast.protocol.events import JobStarted, StepCommitted
from made_events import KINDS
from places import ROOT

CONTRACT = {
    "job_started": {
        "url",
        "coordinator_pid",
        "format",
        "emulated_token_s",
        "emulated_micro_batch_s",
        "flop_per_sample",
        "peak_flop_per_s",
    },
    "coordinator_restarted": {"url", "coordinator_pid", "flop_per_sample", "peak_flop_per_s"},
    "nodes_joined": {"nodes"},
    "workers_changed": {"node", "worker_pids"},
    "node_left": {"node", "reason", "detail"},
    "node_repaired": {"node", "repair", "repair_s"},
    "standby_ready": {"node", "roles", "warm_s"},
    "standby_failed": {"node", "why", "tries", "again"},
    "straggler_found": {"node", "factor", "action", "why"},
    "node_moved": {"from_node", "to_node", "reason", "down_s", "moved_bytes", "detail"},
    "node_stayed": {"node", "reason", "detail"},
    "node_refused": {"node", "why", "address"},
    "memory_sampled": {"since_generation", "nodes"},
    "generation_started": {
        "members",
        "world_size",
        "reason",
        "decision",
        "expert_moves",
        "fault_threshold",
        "seed",
        "micro_batches",
        "global_batch",
    },
    "step_committed": {
        "step",
        "loss",
        "samples",
        "world_size",
        "step_s",
        "skipped",
        "sample_hashes",
        "paused_s",
        "metrics",
        "grad_norm",
        "overflow",
        "skipped_samples",
        "last_step",
    },
    "micro_batch_skipped": {"step", "micro_batch", "reason"},
    "step_skipped": {"step", "why", "in_a_row"},
    "loss_not_finite": {"step", "loss"},
    "flop_counted": {"step", "flop_per_sample"},
    "evaluated": {"name", "step", "samples", "metrics"},
    "failure_detected": {
        "node",
        "kind",
        "detector",
        "severity",
        "after_s",
        "category",
        "step",
        "phase",
        "micro_batch",
        "detail",
        "tries",
    },
    "limit_raised": {"node", "step", "phase", "limit_s", "why", "micro_batch"},
    "stacks_taken": {"of_generation", "suspects", "workers", "stacks", "missing"},
    "recovered": {
        "action",
        "state_source",
        "moved_bytes",
        "detect_s",
        "decide_s",
        "regroup_s",
        "transfer_s",
        "redo_s",
        "down_s",
        "experts_moved",
        "micro_batches_kept",
        "micro_batches_redone",
        "why",
    },
    "job_waiting": {"nodes", "expert_slots", "why"},
    "rebalance_decided": {"step", "adopted", "gain_s", "cost_s", "moves", "why"},
    "rebalanced": {"step", "moved_bytes", "experts_moved", "transfer_s", "down_s"},
    "rolled_back": {"to_step", "why"},
    "corruption_found": {"step", "what", "detail", "likely_cause"},
    "checkpoint_saved": {"step", "save_s", "saved_bytes", "stall_s", "period_s", "left_out"},
    "checkpoint_delayed": {"step", "nodes", "left_out", "waited_s"},
    "checkpoint_failed": {"node", "step", "why", "tries"},
    "output_lost": {"file", "why", "node"},
    "checkpoint_rejected": {"name", "why"},
    "snapshot_saved": {"step", "save_s", "saved_bytes", "stall_s", "fault_threshold"},
    "snapshot_failed": {"node", "step", "why"},
    "job_at_risk": {"why"},
    "layout_changed": {"from_layout", "to_layout", "nodes", "step", "why", "down_s", "moved_bytes"},
    "layout_kept": {"layout", "nodes", "why"},
    "snapshot_rejected": {"step", "node", "why"},
    "store_returned": {"away_s"},
    "journal_repaired": {
        "from_seq",
        "to_seq",
        "from_step",
        "to_step",
        "samples",
        "step_samples",
        "loss",
        "step_time",
        "skipped_in_a_row",
    },
    "action_requested": {"who", "command", "why", "about", "about_seq"},
    "job_finished": {"reason", "steps", "samples", "final_loss", "why", "resumable", "samples_since"},
    "job_failed": {"why", "traceback"},
}
COMMON = {"time", "job", "term", "generation", "seq"}


@pytest.mark.parametrize("name", [*CONTRACT, *(KINDS.keys() - CONTRACT.keys())])
def test_every_event_has_exactly_the_fields_of_the_contract(name: str) -> None:
    assert set(KINDS[name].__struct_fields__) == CONTRACT[name] | COMMON


def test_the_events_page_lists_exactly_the_events_and_their_fields() -> None:
    page = (ROOT / "docs" / "events.md").read_text().split("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", page, re.M))
    assert {name: re.findall(r"`(\w+)`", fields) for name, fields in rows.items()} == {
        name: [field for field in kind.__struct_fields__ if field not in COMMON] for name, kind in KINDS.items()
    }
    assert all(f"`{field}`" in page for field in COMMON)


def test_an_event_is_one_flat_json_object() -> None:
    event = StepCommitted(
        time=1.5, job="j", term=1, generation=2, seq=3, step=4, loss=0.1 + 0.2, samples=32, world_size=4, step_s=0.25
    )
    line = json.loads(msgspec.json.encode(event))
    assert line["event"] == "step_committed"
    assert line["loss"] == 0.1 + 0.2, "the loss must have full precision"
    assert set(line) == COMMON | CONTRACT["step_committed"] | {"event"}


def test_a_nan_value_is_written_as_null() -> None:
    started = JobStarted(time=float("nan"), job="j", term=1, generation=0, url="u", coordinator_pid=1)
    assert json.loads(msgspec.json.encode(started))["time"] is None
