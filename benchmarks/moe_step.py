"""Compare a training step of the MoE example on 4 ranks with plain static expert parallelism, in the same processes.

The plain side is as simple as possible: 8 experts, 2 per rank, no replicas, blocking all-to-alls of torch.distributed,
and one all-reduce for the dense gradients. holdfast runs twice: with the same placement, and with replicas (6 slots per
rank, at least 2 hosts per expert), which sends fewer tokens but must reduce expert gradients.

The sides alternate, in a new order each step. The tables show median and range over the steps, by each step's slowest
rank, and the median ratio to the plain side. They show the same for the processor time of all ranks, which other work
on the machine disturbs less.

    OMP_NUM_THREADS=1 python benchmarks/moe_step.py [--steps 40] [--dim 128] [--hidden 256] [--micro-batches 2]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import plain_torch
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from holdfast.planning import Plan, as_slots, make_plan, strategy_named
from holdfast.runtime.groups.communicator import Communicator
from holdfast.runtime.moe.expert_shards.binding import bind_layers, dense_parameters
from holdfast.runtime.moe.expert_shards.gradients import ExpertGradients
from holdfast.runtime.moe.expert_shards.shards import ExpertShards
from holdfast.runtime.moe.hosts import Placement, placement_from_counts
from holdfast.runtime.moe.layer.expert_layer import expert_parameters, moe_layers
from holdfast.runtime.moe.layer.moe_layer import MoE
from holdfast.runtime.reduction.reduction import GradientBuckets, reduce_gradients
from holdfast.runtime.tensors import apply_function, seed_all, to_ints
from tests.harness.local_world import Seat, run_world

RANKS, EXPERTS, TOP_K, LAYERS, HEADS, CONTEXT, SAMPLES = 4, 8, 2, 4, 4, 64, 4
WARM_UP = 5
PARTS = ("forward + backward", "gradient sync", "optimizer")


# ---- plain static expert parallelism ----


class PlainAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        ctx.send, ctx.receive = send, receive
        out = rows.new_empty(sum(receive), rows.shape[1])
        plain_torch.all_to_all(out, rows.contiguous(), receive, send)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (grad,) = grads
        out = grad.new_empty(sum(ctx.send), grad.shape[1])
        plain_torch.all_to_all(out, grad.contiguous(), ctx.send, ctx.receive)
        return out, None, None


class PlainMoE(nn.Module):
    """An MoE layer with static expert parallelism: experts 2r and 2r + 1 are on rank r."""

    def __init__(self, dim: int, hidden: int, layer: int) -> None:
        super().__init__()
        whole = MoE(dim, hidden, EXPERTS, TOP_K, seed=0, layer=layer)
        self.local = EXPERTS // dist.get_world_size()
        mine = slice(dist.get_rank() * self.local, (dist.get_rank() + 1) * self.local)
        self.gate = nn.Parameter(whole.router.weight.detach().clone())
        self.w1, self.w2 = (nn.Parameter(w.detach()[mine].clone()) for w in whole.experts.weights().values())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = (tokens @ self.gate.t()).softmax(-1).topk(TOP_K, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.reshape(-1).argsort(stable=True)
        sent = torch.bincount(chosen.reshape(-1), minlength=EXPERTS)
        got = torch.empty_like(sent)
        plain_torch.all_to_all(got, sent)
        send = to_ints(sent.view(-1, self.local).sum(1))
        receive = to_ints(got.view(-1, self.local).sum(1))
        rows = apply_function(PlainAllToAll, tokens[order // TOP_K], send, receive)
        expert = torch.arange(self.local).repeat(dist.get_world_size()).repeat_interleave(got)
        by_expert = expert.argsort(stable=True)
        ends = got.view(-1, self.local).sum(0).cumsum(0).to(torch.int32)
        hidden = F.gelu(F.grouped_mm(rows[by_expert], self.w1, offs=ends))
        done = torch.empty_like(rows).index_copy(0, by_expert, F.grouped_mm(hidden, self.w2, offs=ends))
        back = apply_function(PlainAllToAll, done, receive, send)
        out = torch.empty_like(back).index_copy(0, order, back).view(-1, TOP_K, x.shape[-1])
        return (out * weights.unsqueeze(-1)).sum(1).view_as(x)


# ---- the rest of the model, the same on all sides ----


class Block(nn.Module):
    def __init__(self, dim: int, moe: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.moe = moe

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, D = x.shape
        qkv = self.qkv(self.norm1(x)).view(B, T, 3, HEADS, D // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, D))
        return x + self.moe(self.norm2(x))


class Model(nn.Module):
    def __init__(self, dim: int, moes: list[nn.Module]) -> None:
        super().__init__()
        self.token = nn.Embedding(256, dim)
        self.blocks = nn.ModuleList(Block(dim, moe) for moe in moes)
        self.head = nn.Linear(dim, 256, bias=False)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.token(batch[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch[:, 1:].flatten())


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    dim: int
    hidden: int
    micro_batches: int
    steps: int


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of all sides. It is fused, because on a CPU the default takes four times as long."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


class PlainSide:
    """Static expert parallelism."""

    def __init__(self, sizes: Sizes) -> None:
        seed_all(0)
        self.model = Model(sizes.dim, [PlainMoE(sizes.dim, sizes.hidden, layer) for layer in range(LAYERS)])
        experts = [p for name, p in self.model.named_parameters() if name.endswith((".w1", ".w2"))]
        self.dense = [p for p in self.model.parameters() if all(p is not expert for expert in experts)]
        self.flat = torch.zeros(sum(p.numel() for p in self.dense))
        self.experts, self.scale = experts, 1.0 / (sizes.micro_batches * RANKS)
        self.optimizer = adamw(self.model)

    def zero(self) -> None:
        self.flat.zero_()
        offset = 0
        for p in self.dense:
            p.grad = self.flat[offset : offset + p.numel()].view_as(p)
            offset += p.numel()
        for p in self.experts:
            p.grad = None

    def backward(self, number: int, batch: torch.Tensor) -> float:
        loss = self.model.loss(batch)
        torch.autograd.backward(loss)
        return float(loss.detach())

    def sync(self) -> None:
        plain_torch.all_reduce(self.flat)
        self.flat.mul_(self.scale)
        for gradient in [p.grad for p in self.experts if p.grad is not None]:
            gradient.mul_(self.scale)

    def apply(self) -> None:
        self.optimizer.step()


class OurSide:
    """The MoE layer of holdfast with any placement."""

    def __init__(self, sizes: Sizes, comm: Communicator, placement: Placement) -> None:
        seed_all(0)
        moes = [MoE(sizes.dim, sizes.hidden, EXPERTS, TOP_K, seed=0, layer=layer) for layer in range(LAYERS)]
        self.model = Model(sizes.dim, list(moes))
        layers = moe_layers(self.model)
        for layer, held in enumerate(placement):
            mine = sorted(set(held[comm.rank]))
            ExpertShards(layers).rearrange(layer, mine, rows=len(mine))
        self.comm, self.scale = comm, 1.0 / (sizes.micro_batches * RANKS)
        self.state = bind_layers(layers, comm, placement)
        self.gradients = ExpertGradients(layers, placement, comm)
        self.buckets = GradientBuckets(dense_parameters(self.model))
        self.optimizer = adamw(self.model)
        assert len(expert_parameters(self.model)) == 2 * LAYERS

    def zero(self) -> None:
        self.buckets.zero()
        self.gradients.zero()

    def backward(self, number: int, batch: torch.Tensor) -> float:
        self.state.start_micro_batch(1, number)
        loss = self.model.loss(batch)
        torch.autograd.backward(loss)
        self.buckets.collect()
        self.gradients.collect()
        return float(loss.detach())

    def sync(self) -> None:
        reduce_gradients((self.buckets, self.gradients), self.comm, self.scale)
        self.buckets.use_reduced()
        self.gradients.use_reduced()

    def apply(self) -> None:
        self.optimizer.step()


def timed_step(
    side: PlainSide | OurSide, comm: Communicator, batches: list[torch.Tensor]
) -> tuple[list[list[float]], float]:
    """Return (wall, processor) seconds of each part, and the sum of the losses."""
    side.zero()
    comm.wait(comm.start_all_gather(torch.empty(comm.size), torch.ones(1)))
    marks = [_now()]
    loss = sum(side.backward(number, batch) for number, batch in enumerate(batches))
    marks.append(_now())
    side.sync()
    marks.append(_now())
    side.apply()
    marks.append(_now())
    return [[b - a for a, b in zip(x, y, strict=True)] for x, y in itertools.pairwise(marks)], loss


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def measure(
    seat: Seat, sizes: Sizes, replicated: Placement, store: str
) -> dict[str, list[tuple[list[list[float]], float]]]:
    """Return (seconds per part, loss) of each step, by side."""
    comm = seat.connect(1)
    plain_torch.join_group(plain_torch.file_store(Path(store), RANKS), rank=seat.rank, world=RANKS)
    static: Placement = tuple(tuple((2 * r, 2 * r + 1) for r in range(RANKS)) for _ in range(LAYERS))
    sides = {
        "plain": PlainSide(sizes),
        "ours, same placement": OurSide(sizes, comm, static),
        "ours, replicas": OurSide(sizes, comm, replicated),
    }
    names = list(sides)
    results: dict[str, list[tuple[list[list[float]], float]]] = {name: [] for name in sides}
    for step in range(sizes.steps + WARM_UP):
        generator = torch.Generator().manual_seed(step * RANKS + seat.rank)
        shape = (sizes.micro_batches, SAMPLES, CONTEXT + 1)
        batches = list(torch.randint(256, shape, generator=generator))
        for turn in range(len(names)):
            name = names[(step + turn) % len(names)]
            result = timed_step(sides[name], comm, batches)
            if step >= WARM_UP:
                results[name].append(result)
    dist.destroy_process_group()
    comm.retire(sever=False)
    seat.reaper.wait_empty(10)
    return results


def report(ranks: list[dict[str, list[tuple[list[list[float]], float]]]]) -> None:
    """Print two tables: wall time of each part on the slowest rank, and processor time summed over all ranks."""
    parts = {name: np.array([[part for part, _ in rank[name]] for rank in ranks]) for name in ranks[0]}
    losses = {name: np.array([[loss for _, loss in rank[name]] for rank in ranks]).sum(axis=0) for name in ranks[0]}
    _print_table("wall time", {name: table[..., 0].max(axis=0) for name, table in parts.items()})
    _print_table("processor time, all ranks", {name: table[..., 1].sum(axis=0) for name, table in parts.items()})
    worst = max(float(np.abs(loss / losses["plain"] - 1).max()) for loss in losses.values())
    print(f"\nlargest relative difference of a step's loss from the plain side's: {worst:.1e}")


def _print_table(title: str, seconds: dict[str, np.ndarray]) -> None:
    """Print one line per part and side; `seconds` is `(steps, parts)`."""
    print(f"\n{title}: ms median (min..max), median of the steps' ratios to plain")
    for part, label in enumerate((*PARTS, "all but gradient sync", "whole step")):
        print(f"  {label}")
        for name, table in seconds.items():
            mine, plain = (_column(t, part) for t in (table, seconds["plain"]))
            low, high, ratio = mine.min() * 1e3, mine.max() * 1e3, statistics.median(mine / plain)
            print(f"    {name:22} {np.median(mine) * 1e3:7.1f} ({low:.1f}..{high:.1f})  {ratio:.2f}")


def _column(seconds: np.ndarray, part: int) -> np.ndarray:
    if part < len(PARTS):
        return seconds[:, part]
    whole = seconds.sum(axis=1)
    return whole - seconds[:, 1] if part == len(PARTS) else whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--micro-batches", type=int, default=2, help="micro-batches per rank, of 4 samples of 64 bytes")
    args = parser.parse_args()
    # The first optimizer imports torch modules for seconds. Do that here once, not in every process.
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    slots = as_slots(6, RANKS)
    plan = make_plan(np.ones((LAYERS, EXPERTS)), slots, fault_threshold=2, strategy=strategy_named("mro"))
    assert isinstance(plan, Plan)
    sizes = Sizes(dim=args.dim, hidden=args.hidden, micro_batches=args.micro_batches, steps=args.steps)
    print(f"{RANKS} ranks, {LAYERS} layers, {EXPERTS} experts, top {TOP_K}; {sizes}")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        report(run_world(RANKS, measure, sizes, placement_from_counts(plan.counts), store, timeout_s=900))


if __name__ == "__main__":
    main()
