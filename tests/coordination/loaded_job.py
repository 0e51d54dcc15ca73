"""A job with experts and known loads, shared by tests of loads, placements and searches."""

from __future__ import annotations

import numpy as np
from machinery import Job, attach, hello, w

from holdfast.coordination.experts.blobs import decode_experts
from holdfast.coordination.progress.loads import encode_loads
from holdfast.planning.arrays import FloatArray
from holdfast.protocol.job_spec import ExpertSpec, JobSpec
from holdfast.protocol.messages import any_side as msg

SHAPE = msg.ExpertShape(layers=2, experts=4, slots=3)
SKEWED = np.array([[90.0, 10, 10, 10], [1, 1, 1, 30]])


def moe_job(nodes: int = 3, shape: msg.ExpertShape = SHAPE, *, rebalance_every: int = 200) -> Job:
    """Return a job in which all nodes have entered the first generation."""
    job = Job(nodes=nodes, spec=JobSpec(experts=ExpertSpec(rebalance_every=rebalance_every))).boot()
    for index in range(nodes):
        job.connect(hello(f"n{index}"))
        job.deliver(attach(w(f"n{index}"), experts=shape))
    for index in range(nodes):
        job.deliver(msg.Entered(worker=w(f"n{index}"), generation=1, applied=0))
    return job


def loads(
    tokens: FloatArray = SKEWED, *, node: str = "n0", step: int = 10, generation: int = 1, token_s: float = 0.01
) -> msg.Loads:
    blob = encode_loads(tokens)
    return msg.Loads(worker=w(node), generation=generation, step=step, tokens=blob, expert_bytes=100, token_s=token_s)


def replicas(plan: msg.GenerationPlan, shape: msg.ExpertShape = SHAPE) -> list[list[int]]:
    """Return the number of replicas per layer and expert."""
    assert plan.expert_plan is not None
    return sum(decode_experts(blob, shape) for blob in plan.expert_plan.placement).tolist()  # type: ignore[union-attr]
