"""Compare flat groups with groups built level by level: the commit operation and the reduction with 8 to 64 gloo ranks.

Both groups consist of the same processes and alternate. For each world the benchmark prints the connections of a rank,
the messages of one commit operation over all ranks, and how many of them leave a node. It prints the time to build the
group: the clock of the slowest rank, and a rank's processor time (as if each rank had its own core). For the commit
operation and a reduction of `--parameters` it prints the median wall time on rank 0, and the processor time of all
ranks together, on any number of cores.

All ranks share one machine, so this measures the cost of messages, not their time on a network. A separate column
therefore adds `--latency` per message hop (one per level).

    make bench-levels
    OMP_NUM_THREADS=1 python benchmarks/levels.py [--worlds 8x1,8x4] [--rounds 50] [--parameters 1000000]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from holdfast.planning.levels import FAN_OUT, compute_levels
from holdfast.runtime.groups.commit import finish_commit, start_commit
from holdfast.runtime.groups.communicator import Communicator
from holdfast.runtime.reduction.reduction import EMPTY_RESULT, GradientBuckets, reduce_gradients
from tests.harness.local_world import Seat, run_world

WARM_UP = 3


@dataclass(frozen=True, slots=True)
class SideCosts:
    """Seconds (wall, processor) of one side: building the group, each commit and each reduction."""

    build: tuple[float, float]
    commits: list[tuple[float, float]]
    reductions: list[tuple[float, float]]


def commit(comm: Communicator) -> None:
    finish_commit(start_commit(comm), EMPTY_RESULT)


def time_rounds(seat: Seat, rounds: int, work: Callable[[], None]) -> list[tuple[float, float]]:
    """Return the seconds of each round over all ranks, without the warm-up rounds."""
    spent: list[tuple[float, float]] = []
    for _ in range(rounds + WARM_UP):
        seat.meet()
        wall, processor = time.perf_counter(), time.process_time()
        work()
        spent.append((time.perf_counter() - wall, time.process_time() - processor))
    return spent[WARM_UP:]


def measure(seat: Seat, nodes: list[str], fan_out: int, rounds: int, parameters: int) -> list[SideCosts]:
    """Return this rank's costs of both sides: flat, and level by level."""
    model = nn.Linear(parameters // 100, 100, bias=False)
    model.weight.grad = torch.ones_like(model.weight)
    buckets = GradientBuckets(model.parameters())
    buckets.collect()
    sides: list[SideCosts] = []
    for generation, flat_up_to in ((1, len(nodes)), (2, 1)):
        seat.meet()
        wall, processor = time.perf_counter(), time.process_time()
        comm = seat.connect(
            generation,
            nodes=nodes,
            any_to_any=False,
            flat_up_to=flat_up_to,
            fan_out=fan_out,
            build_timeout_s=120.0,
        )
        build = time.perf_counter() - wall, time.process_time() - processor
        commits = time_rounds(seat, rounds, lambda comm=comm: commit(comm))
        reductions = time_rounds(
            seat, max(rounds // 10, 3), lambda comm=comm: (reduce_gradients([buckets], comm, 1.0), None)[1]
        )
        sides.append(SideCosts(build, commits, reductions))
        seat.meet()
        comm.retire(sever=False)
        seat.reaper.wait_empty(60)
    return sides


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default="8x1,16x1,32x1,64x1,2x4,4x4,8x4,8x8", help="nodes x workers, ...")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--fan-out", type=int, default=FAN_OUT)
    parser.add_argument("--latency", type=float, default=30e-6, help="seconds per hop of the modelled network")
    options = parser.parse_args()
    print(f"{options.rounds} commits, reductions of {options.parameters} parameters, fan-out {options.fan_out}")
    for world in options.worlds.split(","):
        count, workers = map(int, world.split("x"))
        nodes = [f"node-{node}" for node in range(count) for _ in range(workers)]
        ranks = run_world(
            len(nodes), measure, nodes, options.fan_out, options.rounds, options.parameters, timeout_s=570
        )
        for side, flat_up_to in enumerate((len(nodes), 1)):
            print_line(world, nodes, flat_up_to, options, [rank[side] for rank in ranks])


def print_line(
    world: str, nodes: list[str], flat_up_to: int, options: argparse.Namespace, ranks: list[SideCosts]
) -> None:
    """Print one line."""
    every = [compute_levels(nodes, rank, flat_up_to=flat_up_to, fan_out=options.fan_out) for rank in range(len(nodes))]
    peers = [(rank, peer) for rank, levels in enumerate(every) for group in levels.groups for peer in group]
    messages = sum(rank != peer for rank, peer in peers)
    across = sum(nodes[rank] != nodes[peer] for rank, peer in peers)
    hops = len(every[0].owners)

    def processor(rounds: Callable[[SideCosts], list[tuple[float, float]]]) -> float:
        return statistics.median(map(sum, zip(*([p for _, p in rounds(rank)] for rank in ranks), strict=True)))

    def wall(rounds: Callable[[SideCosts], list[tuple[float, float]]]) -> str:
        seconds = sorted(w for w, _ in rounds(ranks[0]))
        return f"{statistics.median(seconds) * 1e3:6.1f} ({seconds[0] * 1e3:.1f}..{seconds[-1] * 1e3:.1f})"

    print(
        f"{world:>6} {'levels ' + 'x'.join(map(str, every[0].owners)) if hops > 1 else 'at once':16} "
        f"build {max(rank.build[0] for rank in ranks):6.2f} s, "
        f"cpu of a rank {statistics.median(rank.build[1] for rank in ranks) * 1e3:5.1f} ms  "
        f"connections {messages // len(nodes):3}  "
        f"messages {messages:5} ({across:5} across)  commit {wall(lambda r: r.commits):22} ms, "
        f"cpu {processor(lambda r: r.commits) * 1e3:6.1f} ms  "
        f"reduction {wall(lambda r: r.reductions):24} ms, cpu {processor(lambda r: r.reductions) * 1e3:7.1f} ms  "
        f"network {hops * options.latency * 1e6:.0f} us",
        flush=True,
    )


if __name__ == "__main__":
    main()
