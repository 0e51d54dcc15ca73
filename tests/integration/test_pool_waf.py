"""A pool with the policy `waf`, which allocates nodes by measured throughput, with real processes."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from job_cases import TINY

from tests.harness.local_pool import LocalPool

pytestmark = pytest.mark.xdist_group("waf")


@pytest.fixture(scope="module")
def pool(start_shared_pool: Callable[..., LocalPool]) -> Iterator[LocalPool]:
    pool = start_shared_pool(3, "--policy", "waf")
    yield pool
    pool.end()


@pytest.mark.soak
def test_plans_use_the_step_times_measured_for_each_number_of_nodes(pool: LocalPool, tmp_path: Path) -> None:
    spec, gate = tmp_path / "job.toml", tmp_path / "gate-5"
    spec.write_text(
        f'script = "{TINY}"\nname = "one"\nargs = ["--steps", "1000000", "--gate", "{tmp_path}/gate"]\n'
        "min_nodes = 1\nmax_nodes = 3\n"
        '[experiments]\nemulate_compute = "0.05/micro-batch"\n[output]\nflop_per_sample = 1e9\n'
    )
    gate.touch()
    found = tmp_path / "pace.toml"
    output = pool.call("calibrate", str(spec), "--nodes", "1:2", "-o", str(found))
    assert "1 node: " in output
    assert "2 nodes: " in output
    pace = tomllib.loads(found.read_text())["pace"]
    assert len(pace["step_s"]) == 2
    assert pace["step_s"][0] > pace["step_s"][1] > 0, "two nodes must be faster than one"
    pool.wait(lambda: pool.job("one-calibrate")["state"] == "stopped", "end of the calibration")

    # The job waits before its own measurements, because on a busy machine three nodes may not be faster than two.
    gate.unlink()
    spec.write_text(spec.read_text() + found.read_text())
    pool.call("submit", str(spec))
    assert pool.job("one")["pace"]["step_s"].keys() == {"1", "2"}
    pool.wait(pool.has("one", 3), "all nodes")
    pool.goes_on("one")
    answer = json.loads(pool.call("whatif", "lose", pool.job("one")["nodes"][0], "--json"))
    assert (answer["shares_now"], answer["shares"]) == ({"one": 3}, {"one": 2})
    assert answer["worth"]["gain"] > 0
    assert "4 then" in pool.call("whatif", "add", "1")
    assert "is admitted" in pool.call("whatif", "submit", str(spec), code=2)
    assert "lose, add, submit" in pool.call("whatif", "win", "1", code=2)
    assert "there is no node 'n9'" in pool.call("whatif", "lose", "n9", code=3)
    assert "it cannot be written" in pool.call("calibrate", str(spec), "--nodes", "1", "-o", str(tmp_path), code=2)
    assert "--nodes is '3:1'" in pool.call("calibrate", str(spec), "--nodes", "3:1", code=2)
    plan = pool.events("plan_decided")[-1]
    assert plan["shares"] == {"one": 3}
    assert plan["gain"] > plan["cost"] >= 0
    gate.touch()
    pool.call("stop", "-j", "one")


RAISES = """
import torch, holdfast
job = holdfast.init()
model = torch.nn.Linear(4, 1)
data = torch.utils.data.TensorDataset(torch.ones(32, 4), torch.ones(32, 1))
job.protect(model, torch.optim.SGD(model.parameters(), lr=1e-3), data, global_batch=8, micro_batch=2)
for step in job.steps(1_000_000):
    if job.world_size > 1:
        raise RuntimeError("it cannot do that with two")
    for x, y in step.micro_batches():
        step.backward((model(x) - y).square().mean())
    step.apply()
"""


def test_a_calibration_interrupted_by_a_failure_keeps_its_results(pool: LocalPool, tmp_path: Path) -> None:
    script, spec, found = tmp_path / "raises.py", tmp_path / "job.toml", tmp_path / "pace.toml"
    script.write_text(RAISES)
    spec.write_text(f'script = "{script}"\nname = "two"\n[experiments]\nemulate_compute = "0.02/micro-batch"\n')
    output = pool.call("calibrate", str(spec), "--nodes", "1:3", "-o", str(found), code=1)
    assert "1 node: " in output
    assert "the calibration is kept as far as it came: two-calibrate is over: failed" in output
    pace = tomllib.loads(found.read_text())["pace"]
    assert len(pace["step_s"]) == 1
    assert pace["micro_batches"] == 4
