"""The paper's two testbeds as numbers: the cost of a step and of a recovery. MODELLED: this machine is neither.

The paper prints 45 and 34 samples/s of Lazarus and DS with GPT-M on 10 undisturbed RTX 3090 (section 6.2). With the
recorded loads, they determine both constants of a step. A reconfiguration takes 20-40 s (6.3), of which NCCL's groups
take 5-15 s. Each expert has 63 or 112 MB of state, which is 14 bytes per parameter. Checkpoints travel at 10 Gbit/s
(6.1, 6.6), every 50 steps (DS) or 250, and four times as rarely if failures are rare. Experts are rebalanced every 200
steps. Fitted to one ratio: `RESTART_S`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from modelled_job import Costs, Policy
from policies import EVERY, Busiest, ChunkPace, Elastic, Static, Workload, ep_size_of, padded_load
from setting import MODELS, SLOTS, Model, Recording

#: Samples/s of GPT-M on 10 nodes without failures, in the first 40 minutes.
PRINTED_LAZARUS, PRINTED_DS, PRINTED_STEPS = 45.0, 34.0, 2700
BATCH, TOKENS = 4, 4096
RECONFIGURE_S, REBALANCE_S = 30.0, 5.0
#: FITTED to the 2.8 of GPT-S in Figure 6: detection (NCCL's timeout, 10-20 s), start of processes, CUDA and groups.
RESTART_S = 180.0
STATE_BYTES = 14.0
STORE = 10e9 / 8
WARM_UP = 100


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One of the two testbeds, with one model."""

    model: Model
    data: Path
    #: Additional seconds per byte of a node's tokens compared with the first testbed, where it is 0.
    slower_link: float = 0.0
    restart_s: float = RESTART_S

    @cached_property
    def workload(self) -> Workload:
        """The cost of a step: GPT-M's constants, scaled by the square of the width for other models."""
        fixed_s, expert_s = calibrate(self.data)
        width = (self.model.dim / MODELS["M"].dim) ** 2
        travelling = TOKENS * self.model.layers * 4 * 2 * self.model.dim  # both directions, forward and backward, FP16
        return Workload(
            recording=Recording(self.data, self.model),
            fixed_s=fixed_s * width,
            expert_s=expert_s * width,
            wire_s=travelling * self.slower_link,
            samples=BATCH,
        )

    @property
    def ep_size(self) -> int:
        """Number of nodes in a group of the static policies."""
        return ep_size_of(self.model.experts)

    def elastic(self, name: str) -> Elastic:
        """Return the policy of Lazarus or of holdfast."""
        ours = name == "holdfast"
        return Elastic(name=name, workload=self.workload, strategy="best" if ours else "mro", keeps=ours)

    def static(self, name: str, *, live: bool, busiest: Busiest = padded_load) -> Static:
        """Return the policy of DS or Tutel, or with live recovery of DS(FT) or Tutel(FT)."""
        pace = ChunkPace(workload=self.workload, ep_size=self.ep_size, busiest=busiest)
        return Static(name=name, pace=pace, ep_size=self.ep_size, live=live)

    def costs(self, policy: Policy, nodes: int, rare: int = 1) -> Costs:
        """Return the costs of recoveries of a policy; checkpoints are `rare` times as far apart."""
        elastic = isinstance(policy, Elastic)
        held = SLOTS if elastic else self.model.experts // self.ep_size
        of_experts = self.model.layers * self.model.experts * self.model.expert_bytes
        whole = max(self.model.parameters * STATE_BYTES, of_experts)
        loaded = nodes * (whole - of_experts + held * self.model.layers * self.model.expert_bytes)
        restarts = isinstance(policy, Static) and not policy.live
        return Costs(
            reconfigure_s=RECONFIGURE_S,
            rebalance_s=REBALANCE_S,
            restart_s=self.restart_s + loaded / STORE,
            save_s=whole / STORE,
            checkpoint_every=(50 if restarts else 250) * rare,
            rebalance_every=EVERY if elastic else 0,
        )


@cache
def calibrate(data: Path) -> tuple[float, float]:
    """Return (`fixed_s`, `expert_s`) of GPT-M, from the two printed rates and the loads of that time."""
    unit = Workload(recording=Recording(data, MODELS["M"]), fixed_s=0.0, expert_s=1.0)
    nodes = tuple(f"node{number}" for number in range(10))
    lazarus = Elastic(name="Lazarus", workload=unit, strategy="mro", keeps=False)
    ep_size = ep_size_of(MODELS["M"].experts)
    chunks = ChunkPace(workload=unit, ep_size=ep_size, busiest=padded_load)
    ds = Static(name="DS", pace=chunks, ep_size=ep_size, live=False)
    steps = range(WARM_UP, PRINTED_STEPS, 10)
    busiest: list[float] = []
    for policy in (lazarus, ds):
        formation = policy.form(nodes, steps[0])
        assert formation is not None
        total = 0.0
        for step in steps:
            formation = policy.rebalance(formation, step) if step % EVERY == 0 else formation
            total += formation.step_s(step)
        busiest.append(total / len(steps))
    samples = len(nodes) * BATCH
    expert_s = (samples / PRINTED_DS - samples / PRINTED_LAZARUS) / (busiest[1] - busiest[0])
    return samples / PRINTED_LAZARUS - expert_s * busiest[0], expert_s
