"""Measure MoE layer throughput under skewed load: elastic replicas against static expert parallelism (Lazarus, 6.5).

There are 4 ranks, 8 experts, top 1, and an EMULATED accelerator: expert computation takes a stated time per token, the
same for both sides, and twice that in the backward pass. Routing and exchange are real. One expert gets 1/8, 2/8, 4/8
or 6/8 of all tokens, and the others share the rest.

Static: 2 experts per rank, as plain expert parallelism places them; more slots would not help. Elastic: replicas by Eq.
1 from the recorded loads, f = 2, capacities balanced over ranks ("minmax"), in three variants: the default strategy
with 6 and with 8 slots per rank, and spread with 6. All sides alternate in the same processes. The table shows median
and range of tokens/s over the repeats, forward and backward; the slowest rank of each repeat counts.

    OMP_NUM_THREADS=1 python benchmarks/layer_throughput.py [--repeats 9] [--seconds-per-token 5e-4]
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from holdfast.planning import Plan, as_slots, make_plan, strategy_named
from holdfast.runtime.moe.expert_shards.binding import bind_layers
from holdfast.runtime.moe.expert_shards.shards import ExpertShards
from holdfast.runtime.moe.experts.emulation import Emulation
from holdfast.runtime.moe.gates.routing_trace import RoutingTrace
from holdfast.runtime.moe.hosts import Placement, placement_from_counts
from holdfast.runtime.moe.layer.moe_layer import MoE
from tests.harness.local_world import Seat, run_world

RANKS, EXPERTS, DIM, HIDDEN = 4, 8, 32, 32
SHARES = (1, 2, 4, 6)
WARM_UP = 2
STATIC: Placement = (tuple((2 * rank, 2 * rank + 1) for rank in range(RANKS)),)
#: Strategy and slots per rank.
ELASTIC = {"best, 8 slots": ("best", 8), "best, 6 slots": ("best", 6), "spread, 6 slots": ("spread", 6)}
SIDES = ("static", *ELASTIC)


def loads_of(eighths: int) -> np.ndarray:
    """Return tokens per expert, `(1, E)`: the first expert gets this many eighths of 8 * 7 * 8 tokens."""
    hot = 56 * eighths
    return np.array([[hot, *[(448 - hot) // 7] * (EXPERTS - 1)]])


def placement_of(side: str, eighths: int) -> Placement:
    """Return the experts of each rank: fixed, or replicas by Eq. 1."""
    if side == "static":
        return STATIC
    strategy, slots = ELASTIC[side]
    plan = make_plan(
        loads_of(eighths), as_slots(slots, RANKS), fault_threshold=2, strategy=strategy_named(strategy), held=None
    )
    assert isinstance(plan, Plan)
    return placement_from_counts(plan.counts)


class Side:
    """One layer with one placement."""

    def __init__(self, seat: Seat, generation: int, placement: Placement, eighths: int, seconds: float) -> None:
        self.comm = seat.connect(generation)
        routing = RoutingTrace(loads_of(eighths)[None], [1]).layer_routing(0, 1, seed=eighths)
        self.layer = MoE(DIM, HIDDEN, EXPERTS, 1, seed=0, routing=routing, dispatch="minmax")
        self.layer.emulation = Emulation(seconds_per_token=seconds)
        mine = sorted(set(placement[0][seat.rank]))
        ExpertShards([self.layer]).rearrange(0, mine, rows=len(mine))
        self.state = bind_layers([self.layer], self.comm, placement)

    def run(self, repeat: int, tokens_TD: torch.Tensor) -> float:
        """Return the seconds of one forward and backward pass on this rank, after all ranks are ready."""
        self.state.start_micro_batch(repeat, self.comm.rank)
        self.comm.wait(self.comm.start_all_gather(torch.empty(RANKS), torch.ones(1)))
        started = time.perf_counter()
        self.layer(tokens_TD).sum().backward()
        seconds = time.perf_counter() - started
        assert self.state.void is None
        return seconds

    def close(self) -> None:
        """Retire the group."""
        self.comm.retire(sever=False)


def measure(seat: Seat, repeats: int, tokens: int, seconds: float) -> dict[tuple[int, str], list[float]]:
    """Return the seconds of each repeat, by share and side."""
    keys = [(share, side) for share in SHARES for side in SIDES]
    sides = {
        (share, side): Side(seat, generation, placement_of(side, share), share, seconds)
        for generation, (share, side) in enumerate(keys, 1)
    }
    results: dict[tuple[int, str], list[float]] = {key: [] for key in sides}
    tokens_TD = torch.randn(tokens, DIM)
    for repeat in range(1, repeats + WARM_UP + 1):
        for key in sides if repeat % 2 else reversed(sides):
            took = sides[key].run(repeat, tokens_TD)
            if repeat > WARM_UP:
                results[key].append(took)
    for side in sides.values():
        side.close()
    seat.reaper.wait_empty(10)
    return results


def print_report(rates: dict[tuple[int, str], np.ndarray]) -> None:
    """Print a table, and the goals with the results."""
    print("tokens/s, forward and backward: median (min..max)")
    middle = {key: float(np.median(rate)) for key, rate in rates.items()}
    for side in SIDES:
        print(f"  {side}")
        for share in SHARES:
            rate, of_even = rates[share, side], middle[share, side] / middle[1, side]
            ratio = middle[share, side] / middle[share, "static"]
            span = f"({rate.min():.0f}..{rate.max():.0f})"
            print(f"    {share}/8  {middle[share, side]:7.0f} {span:16} {of_even:.2f} of 1/8, {ratio:.2f}x static")
    print("goals                at its worst, of 1/8   at 6/8, x static   at 1/8, x static")
    print("  asked              0.90                   2.00               0.95")
    for side in ELASTIC:
        worst = min(middle[share, side] for share in SHARES) / middle[1, side]
        skewed, even = (middle[share, side] / middle[share, "static"] for share in (6, 1))
        print(f"  {side:18} {worst:.2f}                   {skewed:.2f}               {even:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=512, help="tokens per rank")
    parser.add_argument("--seconds-per-token", type=float, default=5e-4)
    args = parser.parse_args()
    ranks = run_world(RANKS, measure, args.repeats, args.tokens, args.seconds_per_token, timeout_s=900)
    total = RANKS * args.tokens
    rates = {key: total / np.array([rank[key] for rank in ranks]).max(axis=0) for key in ranks[0]}
    print(f"{RANKS} ranks, {EXPERTS} experts, {total} tokens, EMULATED: {args.seconds_per_token:g} s per token")
    print_report(rates)


if __name__ == "__main__":
    main()
