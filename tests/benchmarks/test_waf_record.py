"""Tests of `make bench-waf`: its traces, and the data it reads from the journals of a pool and its jobs."""

from __future__ import annotations

from typing import Any, cast

import pool_waf
from pool_waf_record import RunStart, record_run

from benchmarks.real_run import NodeChange, RealStep
from tests.harness.local_pool import LocalPool

BEGUN = 1000.0


class PlayedPool:
    """A pool that consists only of journals."""

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        every: list[dict[str, Any]] = [{"time": 990.0, "event": "node_added", "node": node} for node in ("a", "b")]
        every += [{"time": 991.0, "event": "node_granted", "node": node, "job": "only"} for node in ("a", "b")]
        every += [{"time": 1003.0, "event": "node_released", "node": "b", "job": "only"}]
        return [event for event in every if event["event"] in kinds]

    def events_of(self, name: str) -> list[dict[str, Any]]:
        assert name == "only"
        started = {"event": "generation_started", "reason": "start", "micro_batches": 2, "global_batch": 8}
        step = {"event": "step_committed", "samples": 8, "world_size": 2, "generation": 1, "step_s": 2.0}
        return [
            {**started, "time": 992.0, "generation": 1, "members": ["a", "b"]},
            {**step, "time": 999.0, "step": 1},
            {**step, "time": 1001.0, "step": 2},
            {"event": "rolled_back", "time": 1004.0, "generation": 2, "to_step": 0},
            {**step, "time": 1006.0, "step": 1, "generation": 2, "world_size": 1},
        ]


def test_a_run_is_recorded_from_its_journals() -> None:
    struck = (NodeChange(3.0, "b", "lost"),)
    begin = RunStart(BEGUN, "waf", 10.0, struck, {"only": 2}, {"only": 1.5}, 1e9)
    run = record_run(cast(LocalPool, PlayedPool()), begin)
    assert run.first == {"a": "only", "b": "only"}
    assert [(word.at, word.node, word.what) for word in run.words] == [(3.0, "b", "released")]
    (job,) = run.jobs
    assert (job.weight, job.most, job.micro_batches, job.samples) == (1.5, 2, 2, 8)
    assert job.steps[2] == RealStep(4.0, 0.0, 0, -16, 2)
    # Half of the step across the start, minus the two undone steps, plus the repeated one.
    assert run.total == 1.5e9 * (4 - 16 + 8)


def test_a_trace_depends_on_its_seed_and_removes_at_most_two_nodes_at_once() -> None:
    for seed in range(50):
        struck = pool_waf.draw_trace(seed, 300.0)
        assert struck == pool_waf.draw_trace(seed, 300.0)
        away: set[str] = set()
        for one in struck:
            assert (one.node in away) == (one.what == "back")
            (away.discard if one.what == "back" else away.add)(one.node)
            assert len(away) <= pool_waf.MOST_AWAY
            assert one.node != "node-0"
