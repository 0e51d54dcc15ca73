"""Measure how fast workers abandon a hanging collective, and whether abandoned groups leak.

Each round builds a group of real processes. One process does not join the operation, or is stopped with SIGSTOP during
it, so that the operation hangs. The generation is then halted everywhere, and each process leaves. The benchmark prints
the time from the halt to the return from `wait` and from `retire`, over all processes and rounds. The target is 50 ms.

    OMP_NUM_THREADS=1 python benchmarks/abandon.py [--rounds 200] [--reconfigurations 50] [--ranks 4 8]
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from standstill import SuspensionWatch

from holdfast.runtime.groups.commit import finish_commit, start_commit
from holdfast.runtime.groups.communicator import Communicator, HaltedError, PeerLostError
from holdfast.runtime.reduction.reduction import EMPTY_RESULT
from tests.harness.local_world import Seat, run_world

TARGET_S = 0.050
ROWS = 1 << 18
CONTROL_GENERATION = 0

Operation = Callable[[Communicator], None]


def even_all_to_all(comm: Communicator) -> None:
    rows = ROWS // comm.size * comm.size
    comm.wait(comm.start_all_to_all(torch.empty(rows), torch.ones(rows)))


def uneven_all_to_all(comm: Communicator) -> None:
    def rows(source: int, target: int) -> int:
        return ROWS // (4 * comm.size) * ((source + target) % 3)

    sent = [rows(comm.rank, peer) for peer in range(comm.size)]
    received = [rows(peer, comm.rank) for peer in range(comm.size)]
    comm.wait(comm.start_all_to_all(torch.empty(sum(received)), torch.ones(sum(sent)), received, sent))


def all_gather(comm: Communicator) -> None:
    comm.wait(comm.start_all_gather(torch.empty(ROWS * comm.size // 4), torch.ones(ROWS // 4)))


def commit(comm: Communicator) -> None:
    finish_commit(start_commit(comm), EMPTY_RESULT)


KINDS: dict[str, Operation] = {
    "all_to_all even": even_all_to_all,
    "all_to_all uneven": uneven_all_to_all,
    "all_gather": all_gather,
    "commit": commit,
}


@dataclass(kw_only=True, slots=True)
class Tally:
    """Results of one process: seconds from the halt until it left, and how the operations ended."""

    leave_s: list[float] = field(default_factory=list[float])
    retire_s: list[float] = field(default_factory=list[float])
    halted: int = 0
    lost: int = 0
    completed: int = 0
    buried_most: int = 0
    empty_s: float = 0.0


class HaltTimer:
    """Sets the halt event after a delay, from another thread as a worker's listener does, and records the time."""

    def __init__(self, halt: threading.Event, delay_s: float) -> None:
        self.at = 0.0
        self._halt = halt
        self._thread = threading.Timer(delay_s, self._fire)
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def _fire(self) -> None:
        self.at = time.perf_counter()
        self._halt.set()


def run_until_halted(
    comm: Communicator, operation: Operation, halt: threading.Event, delay_s: float, tally: Tally
) -> None:
    """Wait in an operation until halted, and record how it ended."""
    timer = HaltTimer(halt, delay_s)
    try:
        operation(comm)
        tally.completed += 1
    except HaltedError:
        tally.halted += 1
    except PeerLostError:
        tally.lost += 1
    left = time.perf_counter()
    timer.join()
    tally.leave_s.append(max(left - timer.at, 0.0))


def time_retirement(comm: Communicator, tally: Tally) -> None:
    started = time.perf_counter()
    comm.retire()
    tally.retire_s.append(time.perf_counter() - started)


def abandon_round(seat: Seat, number: int, operation: Operation, tally: Tally) -> None:
    """Abandon one operation. Odd rounds stop the victim in the operation, even rounds keep it out.

    No process severs its connections before all have left, so that no process is released by a peer.
    """
    control = seat.board(CONTROL_GENERATION)
    halt = threading.Event()
    comm = seat.connect(number + 1, halt=halt)
    seat.meet()
    victim, stopped = number % seat.size, number % 2 == 1
    chance = random.Random(number)
    delay_s, stop_s = chance.uniform(0.0, 0.01), chance.uniform(0.0, 0.001)
    others = [f"left/{number}/{rank}" for rank in range(seat.size) if rank != victim]
    if seat.rank != victim:
        run_until_halted(comm, operation, halt, delay_s, tally)
        control.post(f"left/{number}/{seat.rank}", b"")
    elif stopped:
        stopper = threading.Timer(stop_s, os.kill, (os.getpid(), signal.SIGSTOP))
        stopper.start()
        run_until_halted(comm, operation, halt, delay_s, Tally())
        stopper.join()
        control.post(f"left/{number}/{seat.rank}", b"")
    control.wait(others, 120.0)
    if stopped and seat.rank == (victim + 1) % seat.size:
        continue_stopped(seat, victim, f"left/{number}/{victim}")
    time_retirement(comm, tally)
    del comm
    tally.buried_most = max(tally.buried_most, seat.reaper.size)
    seat.meet()
    for key in [key for key in control.values() if key.startswith("left/")]:
        control.remove(key)
    seat.meet()


def continue_stopped(seat: Seat, victim: int, until: str) -> None:
    """Send SIGCONT until the process has left: its own timer may stop it only after the first signal."""
    control = seat.board(CONTROL_GENERATION)
    pid = int(control.values()[f"pid/{victim}"])
    while until not in control.values():
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.001)


def run_abandonments(seat: Seat, kind: str, rounds: int) -> Tally:
    """Run all rounds of one kind in one process."""
    control, tally = seat.board(CONTROL_GENERATION), Tally()
    control.post(f"pid/{seat.rank}", str(os.getpid()).encode())
    control.wait([f"pid/{rank}" for rank in range(seat.size)], 120.0)
    for number in range(rounds):
        abandon_round(seat, number, KINDS[kind], tally)
    started = time.perf_counter()
    assert seat.reaper.wait_empty(120.0), f"{seat.reaper.size} groups are left"
    tally.empty_s = time.perf_counter() - started
    seat.meet()
    return tally


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """The open descriptors, threads and resident bytes of a process."""

    descriptors: int
    threads: int
    resident: int

    @classmethod
    def measure(cls) -> Footprint:
        with open("/proc/self/statm") as statm:
            pages = int(statm.read().split()[1])
        return cls(
            descriptors=len(os.listdir("/proc/self/fd")),
            threads=len(os.listdir("/proc/self/task")),
            resident=pages * os.sysconf("SC_PAGE_SIZE"),
        )


def run_reconfigurations(seat: Seat, rounds: int) -> tuple[Footprint, Footprint]:
    """Build, use and retire groups, and return the footprint after warm-up and at the end.

    In every second round an operation is abandoned first.
    """
    tally, first = Tally(), None
    warm_up = max(rounds // 5, 2)
    for number in range(rounds + warm_up):
        if number == warm_up:
            assert seat.reaper.wait_empty(120.0)
            first = Footprint.measure()
        halt = threading.Event()
        comm = seat.connect(number + 1, halt=halt)
        for operation in KINDS.values():
            operation(comm)
        seat.meet()
        if number % 2 and seat.rank:
            run_until_halted(comm, even_all_to_all, halt, 0.005, tally)
        comm.retire(sever=bool(number % 2))
        del comm
        seat.meet()
    assert seat.reaper.wait_empty(120.0), f"{seat.reaper.size} groups are left"
    assert first is not None
    return first, Footprint.measure()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--reconfigurations", type=int, default=50)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    arguments = parser.parse_args()
    print("times in ms")
    print(
        "ranks kind                rounds  halted lost done  leave median/max    > 50  retire max  buried  emptied in"
    )
    for ranks in arguments.ranks:
        with SuspensionWatch() as watch:
            for kind in KINDS:
                print_abandonments(ranks, kind, arguments.rounds)
            print_reconfigurations(ranks, arguments.reconfigurations)
            print(f"{ranks} ranks: {watch.report()}")


def print_reconfigurations(ranks: int, count: int) -> None:
    for rank, (first, last) in enumerate(run_world(ranks, run_reconfigurations, count)):
        print(
            f"{ranks} ranks, {count} reconfigurations, rank {rank}: "
            f"descriptors {first.descriptors} -> {last.descriptors}, threads {first.threads} -> {last.threads}, "
            f"resident {first.resident / 2**20:.1f} -> {last.resident / 2**20:.1f} MiB"
        )


def print_abandonments(ranks: int, kind: str, rounds: int) -> None:
    tallies: list[Tally] = run_world(ranks, run_abandonments, kind, rounds, timeout_s=1200)
    leave_s = [seconds for tally in tallies for seconds in tally.leave_s]
    retire_s = max(seconds for tally in tallies for seconds in tally.retire_s)
    print(
        f"{ranks:5} {kind:20} {rounds:5} {sum(t.halted for t in tallies):7} {sum(t.lost for t in tallies):4} "
        f"{sum(t.completed for t in tallies):4} {statistics.median(leave_s) * 1e3:9.2f} / {max(leave_s) * 1e3:6.1f} "
        f"{sum(s > TARGET_S for s in leave_s):7} {retire_s * 1e3:10.1f} {max(t.buried_most for t in tallies):8} "
        f"{max(t.empty_s for t in tallies):9.2f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
