"""An evaluation in a job of several processes has the same sums as in one process, even if workers die during it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, evaluation

from holdfast.control.link.exit_after_exception import ScriptErrorHook
from holdfast.protocol import events as ev
from holdfast.protocol.checkpoints.directory import find_checkpoints
from holdfast.protocol.messages import any_side as msg
from holdfast.storage import LocalStorage

STEPS = 7
EXPERT_STEPS = 5
Found = dict[int, dict[str, float | None]]


def opened(path: Path, nodes: int, dies: dict[str, int], *gates: int) -> Cluster:
    return Cluster(path, nodes=nodes, options={"steps": STEPS, "float64": True, "evaluate": dies, "gates": gates})


def found_by(cluster: Cluster) -> Found:
    """Return the reported metrics by step; each must occur once, and be in the row of the next step."""
    evaluated = cluster.of(ev.Evaluated)
    assert [(event.name, event.step, event.samples) for event in evaluated] == [("eval", 3, 22), ("eval", 6, 22)]
    rows = {event.step: event.metrics for event in cluster.of(ev.StepCommitted) if event.metrics}
    found = {event.step: event.metrics for event in evaluated}
    paused = {event.step for event in cluster.of(ev.StepCommitted) if event.paused_s > 0}
    assert paused == {4, 7}, "an evaluation must not count as a step's work"
    expected = {step + 1: {f"eval/{name}": value for name, value in metrics.items()} for step, metrics in found.items()}
    assert rows == expected
    return found


def shards(cluster: Cluster) -> dict[str, list[str]]:
    """Return the shards that each node has evaluated, each identified by a number in it."""
    return {path.stem: path.read_text().split() for path in cluster.directory.glob("*.shards")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The results of the same job with one worker and no failure."""
    with opened(tmp_path_factory.mktemp("one"), 1, {}) as cluster:
        cluster.wait_done()
        assert len(set(shards(cluster)["n1"])) == 6, "22 samples make six shards of at most four"
        return found_by(cluster)


def test_two_worker_deaths_in_an_evaluation_do_not_change_its_sums(tmp_path: Path, undisturbed: Found) -> None:
    with opened(tmp_path, 3, {"n2": 2, "n3": 3}) as cluster:
        cluster.wait_done()
        found = found_by(cluster)
        assert cluster.exit_codes() == {"n1": 0, "n2": -9, "n3": -9}
        for step, metrics in undisturbed.items():
            assert (found[step]["x"], found[step]["noise"]) == (metrics["x"], metrics["noise"]), (
                "the sums must be equal in every bit"
            )
            assert found[step] == pytest.approx(metrics, rel=1e-9)
        gone_through = shards(cluster)
        first, rest = gone_through["n1"][:-6], gone_through["n1"][-6:]
        assert len(set(rest)) == 6, "n1 evaluates alone the second time"
        assert len(set(first)) == len(first), "n1 must not repeat a finished shard"
        assert len(gone_through["n2"]) == 1


def test_a_worker_that_joins_before_an_evaluation_takes_part_in_it(tmp_path: Path, undisturbed: Found) -> None:
    """It has the state by then, and computes shards before its first micro-batch."""
    with opened(tmp_path, 2, {}, 3) as cluster:
        cluster.wait("step 2", lambda: len(cluster.of(ev.StepCommitted)) >= 2)
        joiner = cluster.add()
        cluster.wait("the joiner's group", lambda: len(cluster.messages_of(msg.Prepared)) == 3)
        cluster.go(3)
        cluster.wait_done()
        found = found_by(cluster)
        assert found[3] == pytest.approx(undisturbed[3], rel=1e-9)
        assert {event.world_size for event in cluster.of(ev.StepCommitted) if event.step > 3} == {3}
        gone_through = shards(cluster)
        assert sorted(map(len, gone_through.values())) == [4, 4, 4], "two shards of each evaluation"
        assert len(gone_through[joiner]) == 4


def train_experts(directory: str, node: str, options: dict[str, Any]) -> None:
    """Train a model with an MoE layer, evaluate it after steps 2 and 4, and leave the loop after step 5."""
    import torch

    import holdfast

    torch.set_num_threads(1)
    torch.manual_seed(0)
    job = holdfast.init()
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), holdfast.MoE(8, 16, 4, top_k=2), torch.nn.Linear(8, 1)).double()
    x = torch.randn(50, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    y = x.sum(1, keepdim=True)
    data = torch.utils.data.TensorDataset(x, y)
    job.protect(model, torch.optim.AdamW(model.parameters(), lr=1e-2), data, global_batch=24, micro_batch=4, seed=3)
    held_out = torch.utils.data.TensorDataset(x[:18], y[:18])
    measure = evaluation(job, model, Path(directory), node, options["evaluate"])
    job.evaluate(measure, held_out, every=2, save_top_k=2)
    for step in job.steps(100):
        for inputs, targets in step.micro_batches():
            step.backward(torch.nn.functional.mse_loss(model(inputs), targets))
        if step.apply() and step.number == EXPERT_STEPS:
            # A complete checkpoint of step 5 would replace that of step 4 before it was kept as one of the best.
            wait_for_file(Path(directory) / "checkpoints" / "best-eval-00000004.json")
            break
    ended = ScriptErrorHook.find_installed()
    assert ended is not None
    ended.save()  # The runner of a script does this after the script has ended.
    # The simulated agents would treat a process that ends as lost.
    wait_for_file(Path(directory) / "end")


def wait_for_file(path: Path) -> None:
    while not path.exists():
        time.sleep(0.005)


def experts_evaluated(path: Path, nodes: int, dies: dict[str, int]) -> tuple[Cluster, Found]:
    options = {"script": train_experts, "evaluate": dies}
    with Cluster(path, nodes=nodes, options=options, checkpoint_every=100) as cluster:
        cluster.wait("the last checkpoint", lambda: any(e.step == EXPERT_STEPS for e in cluster.of(ev.CheckpointSaved)))
        (path / "end").touch()
    return cluster, {event.step: event.metrics for event in cluster.of(ev.Evaluated)}


def test_all_workers_evaluate_experts_together_although_one_dies(tmp_path: Path) -> None:
    """Of five shards, one of three workers gets none in the second round, and only serves with its experts."""
    (tmp_path / "one").mkdir()
    (tmp_path / "three").mkdir()
    alone, expected = experts_evaluated(tmp_path / "one", 1, {})
    cluster, found = experts_evaluated(tmp_path / "three", 3, {"n2": 2})
    assert [failure.node for failure in cluster.of(ev.FailureDetected)][:1] == ["n2"]
    assert sorted(found) == sorted(expected) == [2, 4]
    for step, metrics in expected.items():
        assert found[step] == pytest.approx(metrics, rel=1e-9)
        assert (found[step]["x"], found[step]["noise"]) == (metrics["x"], metrics["noise"]), (
            "the sums must be equal in every bit"
        )
    for job in (alone, cluster):
        directory = job.directory / "checkpoints"
        assert [name.step for name in find_checkpoints(LocalStorage(directory))][-1] == EXPERT_STEPS, (
            "`break` must leave the state saved"
        )
        best = sorted(path.name for path in directory.glob("best-*") if path.is_dir())
        assert best == ["best-eval-00000002", "best-eval-00000004"]
