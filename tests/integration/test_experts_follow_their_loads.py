"""A job with most tokens on one expert gives it more replicas, and the losses stay the same."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import pytest
from job_cases import FOREVER, TINY_MOE, StartJob, check_losses, goes_on_until_interrupted

from holdfast.protocol.events import (
    FailureDetected,
    GenerationStarted,
    Rebalanced,
    RebalanceDecided,
    Recovered,
    RolledBack,
    StepCommitted,
)
from holdfast.protocol.plan import FaultThreshold
from tests.harness.local_job import LocalJob

#: Expert 0 starts with two of 16 replicas and receives 90% of the tokens.
ARGS = ("--experts", "6", "--hot", "0.9")
OPTIONS = ("--verify-state", "1", "--expert-slots", "4", "--rebalance-every", "15", "--emulate-compute", "0.002/token")


def start(start_job: StartJob, gate: Path) -> LocalJob:
    """Start a job that waits before steps 1, 11, 21, ... until `through` opens the gate."""
    args = (*FOREVER, *ARGS, "--step-seconds", "0.3", "--gates", str(gate))
    job = start_job(*args, nodes=4, options=OPTIONS, script=TINY_MOE)
    job.wait(GenerationStarted, world_size=4)
    return job


def through(gate: Path, *steps: int) -> None:
    for step in steps:
        gate.with_suffix(f".{step}").touch()


def replicas_of_expert_0(job: LocalJob) -> list[int]:
    """Return the replicas of expert 0 per layer; only in the top-1 layer can an expert receive 90% of the tokens."""
    layers = json.loads(job.call("status", "--json"))["experts"]["layers"]
    return [list(chain.from_iterable(layer.values())).count(0) for layer in layers]


def test_a_rebalance_gives_a_hot_expert_more_replicas(start_job: StartJob, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    job = start(start_job, gate)
    before = replicas_of_expert_0(job)
    through(gate, 1, 11)
    decided = job.wait(RebalanceDecided)
    assert decided.adopted, decided
    assert decided.step < 11, "the first decision must follow the first loads, not the first multiple"
    assert decided.gain_s > decided.cost_s > 0
    # On a busy machine the search may end only while the steps wait at a gate.
    through(gate, *range(21, 501, 10))
    started = job.wait(GenerationStarted, reason="rebalance")
    assert (started.world_size, started.expert_moves) == (4, decided.moves)
    assert started.fault_threshold == FaultThreshold(asked=2, given=2)
    rebalanced = job.wait(Rebalanced)
    assert rebalanced.moved_bytes > 0
    assert replicas_of_expert_0(job)[1] > before[1]
    later = job.wait(RebalanceDecided, since=job.events.index(rebalanced))
    # The load is unchanged; the small gain is compared with the cost of the first switch.
    assert later.adopted == (later.gain_s > later.cost_s)
    goes_on_until_interrupted(job)
    check_losses(job, *ARGS, script=TINY_MOE, least=later.step + 3)
    assert not job.all(Recovered)


@pytest.mark.parametrize("place", ["prepared", "moving"])
def test_a_node_that_dies_during_a_rebalance_loses_no_step(start_job: StartJob, tmp_path: Path, place: str) -> None:
    gate = tmp_path / "gate"
    job = start(start_job, gate)
    victim = job.nodes()[2]
    if place == "moving":
        job.inject("kill", victim, step=1, phase="moving")
    through(gate, *range(1, 501, 10))
    assert job.wait(RebalanceDecided).adopted
    if place == "prepared":
        job.signal_node(victim)
    job.wait(FailureDetected, node=victim)
    assert job.wait(Recovered).action == "shrink"
    job.wait(StepCommitted, step=15)
    goes_on_until_interrupted(job)
    check_losses(job, *ARGS, script=TINY_MOE, least=15)
    assert not job.all(RolledBack)
