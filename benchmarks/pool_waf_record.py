"""Converts the journals of a pool and its jobs to a recording of `benchmarks/real_run.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.real_run import NodeAssignment, NodeChange, RealGeneration, RealJob, RealRun, RealStep
from tests.harness.local_pool import LocalPool

#: Decimals of recorded times.
_DIGITS = 2


@dataclass(frozen=True)
class RunStart:
    """The start and the settings of a run."""

    #: The start in Unix seconds.
    at: float
    policy: str
    seconds: float
    struck: tuple[NodeChange, ...]
    #: The largest number of nodes of each job.
    most: Mapping[str, int]
    weights: Mapping[str, float]
    flop: float


def record_run(pool: LocalPool, begin: RunStart) -> RealRun:
    """Return the recording of a finished run."""
    words: list[NodeAssignment] = []
    for event in pool.events("node_granted", "node_released"):
        what = "granted" if event["event"] == "node_granted" else "released"
        words.append(NodeAssignment(round(event["time"] - begin.at, _DIGITS), event["node"], event["job"], what))
    first: dict[str, str] = {}
    for word in words:
        if word.at < 0:
            first |= {word.node: word.job if word.what == "granted" else ""}
    first = {node: job for node, job in first.items() if job}
    return RealRun(
        policy=begin.policy,
        seconds=begin.seconds,
        nodes=tuple(sorted(event["node"] for event in pool.events("node_added"))),
        first=first,
        struck=tuple(NodeChange(round(one.at, _DIGITS), one.node, one.what) for one in begin.struck),
        words=tuple(word for word in words if 0 <= word.at < begin.seconds),
        jobs=tuple(_record_job(pool.events_of(name), name, begin) for name in begin.weights),
    )


def _record_job(events: list[dict[str, Any]], name: str, begin: RunStart) -> RealJob:
    generations, steps, shape = list[RealGeneration](), list[RealStep](), dict[str, Any]()
    committed: dict[int, int] = {}
    for event in events:
        at = round(event["time"] - begin.at, _DIGITS)
        if event["event"] == "generation_started":
            shape = event
            generations.append(RealGeneration(event["generation"], at, event["reason"], tuple(event["members"])))
        elif event["event"] == "step_committed":
            committed[event["step"]] = event["samples"]
            step_s = round(event["step_s"], _DIGITS)
            steps.append(RealStep(at, step_s, event["world_size"], event["samples"], event["generation"]))
        elif event["event"] == "rolled_back":
            undone = sum(committed.pop(step) for step in list(committed) if step > event["to_step"])
            steps.append(RealStep(at, 0.0, 0, -undone, event["generation"]))
    return RealJob(
        name=name,
        weight=begin.weights[name],
        most=begin.most[name],
        micro_batches=shape["micro_batches"],
        samples=shape["global_batch"],
        flop_per_sample=begin.flop,
        steps=tuple(steps),
        generations=tuple(generations),
    )
