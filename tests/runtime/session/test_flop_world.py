"""The FLOP of a round are counted once in a job of several processes, with the same result for any number of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster

from holdfast.protocol import events as ev
from holdfast.protocol.job_spec import ExpertSpec

TOKENS, DIM, HIDDEN, EXPERTS, TOP = 6, 16, 32, 4, 2


def train_experts(directory: str, node: str, options: dict[str, Any]) -> None:
    """Train as a worker of a job with experts."""
    import torch

    import holdfast
    from holdfast import MoE

    torch.set_num_threads(1)
    torch.manual_seed(0)
    job = holdfast.init()
    layers = (torch.nn.Linear(DIM, DIM), MoE(DIM, HIDDEN, EXPERTS, top_k=TOP, seed=1, layer=0), torch.nn.Linear(DIM, 1))
    model = torch.nn.Sequential(*layers)
    x = torch.randn(60, TOKENS, DIM, generator=torch.Generator().manual_seed(5))
    data = torch.utils.data.TensorDataset(x, x.mean(-1, keepdim=True))
    job.protect(
        model, torch.optim.AdamW(model.parameters()), data, global_batch=options["global_batch"], micro_batch=4, seed=3
    )
    for step in job.steps(4):
        for inputs, targets in step.micro_batches():
            step.backward((model(inputs) - targets).square().mean())
        step.apply()


def counted(cluster: Cluster) -> list[float]:
    return [event.flop_per_sample for event in cluster.of(ev.FlopCounted)]


@pytest.mark.parametrize("nodes", [1, 3])
def test_the_flop_of_a_dense_job_are_those_of_its_matrix_products(tmp_path: Path, nodes: int) -> None:
    with Cluster(tmp_path, nodes=nodes, options={"steps": 4}) as cluster:
        cluster.wait_done()
        cluster.assert_replicas_equal()
    # The forward pass, the gradients of both weights, and of the second one's input.
    assert counted(cluster) == [2 * (8 * 16 + 16) * 2 + 2 * 16]
    assert cluster.machine.record.flop_per_sample == counted(cluster)[0]


@pytest.mark.parametrize(("nodes", "micro_batches"), [(1, 3), (2, 3), (3, 2)])
def test_the_flop_of_a_job_with_experts_are_summed_over_all_ranks(
    tmp_path: Path, nodes: int, micro_batches: int
) -> None:
    options = {"script": train_experts, "global_batch": 4 * micro_batches}
    with Cluster(tmp_path, nodes=nodes, options=options, experts=ExpertSpec(slots=4)) as cluster:
        cluster.wait_done()
    first, router, last = (2 * TOKENS * DIM * out for out in (DIM, EXPERTS, 1))
    experts = TOP * 2 * TOKENS * (DIM * HIDDEN + HIDDEN * DIM)
    # The first layer's input needs no gradient, but the weights that combine a token's experts need one.
    assert counted(cluster) == [2 * first + 3 * (router + last + experts) + 2 * TOP * TOKENS * DIM]


def test_flop_are_counted_in_a_later_round_after_a_failure(tmp_path: Path) -> None:
    with Cluster(tmp_path, nodes=3, options={"steps": 6, "gates": (2,)}) as cluster:
        cluster.wait("step 1", lambda: bool(cluster.of(ev.StepCommitted)))
        plan = cluster.machine.record.plan
        assert plan is not None
        # A worker that receives the order late computes a round, reports its FLOP, and dies in the next round.
        victim = plan.members[0].node
        (tmp_path / f"{victim}.due").write_text("compute")
        cluster.fail(victim, step=2, phase="compute")
        cluster.go(2)
        cluster.wait_done()
        cluster.assert_replicas_equal()
    assert [event.step for event in cluster.of(ev.FlopCounted)] == [3]
