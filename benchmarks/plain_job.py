"""Replace machines of a plain torch job without holdfast: the model of recovery.py on gloo with four ranks.

    python benchmarks/plain_job.py --rounds 3

These are the methods of a competent user. The cost is the longest gap between two steps of rank 0 around the
replacement, less the median step:

  save-and-restart      After a step, rank 0 saves and all end. Four new processes start, load and continue.
  warmed zygotes        All end, and are forked again from a process that has imported all modules. Their state is in
                        shared memory and is mapped directly; only the new process copies it.
  naive live migration  All stop and the leaving rank ends. A new process starts, all groups are built again, another
                        rank sends the state to the new process, and all continue.
  naive, from a zygote  The same, but the new process is forked as above.

In their favour: one call reduces all gradients and agrees on the next action. (DDP would import modules for seconds on
its first use.) Weights that are received are not initialized first. Parameters and moments are one tensor that is
saved, sent and read in one piece. Checkpoints are in memory. Processes exit without cleaning up. No scheduler needs
time to find a machine.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Self

import msgspec
import plain_torch
from ending import end_in_order
from plain_worker import WORLD, Change, Role, Row, change_file
from recovery import NEIGHBOURS, format_spread
from standstill import SuspensionWatch

from holdfast.control.link.forking import PRELOAD, Fork, Forked, Streams, ZygoteReply, start_zygote
from holdfast.control.link.framing import FrameDecoder, encode_frame

ROOT = Path(__file__).resolve().parent.parent
WORKER = ROOT / "benchmarks" / "plain_worker.py"
SAVE, ZYGOTES, NAIVE, FORKED = WAYS = (
    "save-and-restart",
    "warmed zygotes",
    "naive live migration",
    "naive, from a zygote",
)
#: Undisturbed steps after each replacement, and before the first one.
SETTLE_STEPS = 6
DEADLINE_S = 120.0
#: Modules that a zygote of plain torch imports in advance: the same as holdfast's, and the job's own.
_PRELOAD = (*(name for name in PRELOAD if not name.startswith("holdfast")), "msgspec", "plain_torch", "dense_gpt")


def main() -> int:
    """Run the methods in turn, and print the cost of each."""
    end_in_order()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with SuspensionWatch() as watch:
        measure(options.rounds, random.Random(options.seed))
        print(watch.report())
    return 0


def measure(rounds: int, rng: random.Random) -> dict[str, list[float]]:
    """Run each method this many times, in turn; print and return the costs in seconds."""
    costs: dict[str, list[float]] = {way: [] for way in WAYS}
    with PlainJob() as job:
        for _ in range(rounds):
            for way in WAYS:
                costs[way].append(job.replace(way, rng.randrange(WORLD)))
                print(f"{way:20s} less the step {costs[way][-1]:6.3f} s", flush=True)
        job.check_steps()
        print(f"\nplain torch, median step {job.median_step() * 1e3:.0f} ms; costs less the median step, seconds:")
    for way, values in costs.items():
        print(f"  {way:20s} {format_spread(values)}")
    return costs


class PlainJob:
    """Four training ranks whose machines are replaced; as a context manager it leaves no process behind."""

    def __init__(self) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="plain-torch-", dir="/dev/shm")
        self._folder = Path(self._temporary.name)
        self._output = (self._folder / "output").open("ab")
        path = os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT / "examples")])
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        self._store, self._port = plain_torch.serve_store()
        self._zygote = ZygoteConnection(self._folder, self._environment, self._output.fileno())
        #: The pidfd of each rank's process, which becomes readable when the process ends.
        self._ends: dict[int, int] = {}
        self._cold: list[subprocess.Popen[bytes]] = []
        self._files = {rank: f"{self._folder}/state-0-{rank}" for rank in range(WORLD)}
        self._generation = 0

    def __enter__(self) -> Self:
        for rank in range(WORLD):
            self._start(rank, cold=False, fresh=True)
        self._wait_steps()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._cold:
            process.kill()
            process.wait()
        self._zygote.close()
        for descriptor in self._ends.values():
            os.close(descriptor)
        self._output.close()
        self._temporary.cleanup()

    def replace(self, way: str, leaver: int) -> float:
        """Replace a rank's machine; return the cost in seconds."""
        at, before = time.time(), self._generation
        self._generation += 1
        if way in (SAVE, ZYGOTES):
            saved = f"{self._folder}/checkpoint-{before}" if way == SAVE else ""
            self._write_change(before, Change(saved=saved))
            self._wait_ends(list(self._ends))
            self._restart_ranks(leaver, saved)
        else:
            self._write_change(before, Change(leaver=leaver))
            self._wait_ends([leaver])
            self._new_file(leaver)
            self._start(leaver, cold=way == NAIVE, sender=(leaver + 1) % WORLD)
        self._wait_steps()
        for saved in self._folder.glob("checkpoint-*"):
            saved.unlink()
        rows = self._rows()
        return max(b.time - a.time for a, b in pairwise(rows) if b.time > at) - self.median_step()

    def median_step(self) -> float:
        """Return the median seconds of the last undisturbed steps."""
        rows = self._rows()
        steps = [b.time - a.time for a, b in pairwise(rows) if a.generation == b.generation]
        return statistics.median(steps[-NEIGHBOURS:])

    def check_steps(self) -> None:
        """Check that no step was lost or repeated."""
        wrong = [f"{a.step} -> {b.step}" for a, b in pairwise(self._rows()) if b.step != a.step + 1]
        if wrong:
            raise SystemExit("plain torch: steps " + ", ".join(wrong))

    # ---- inside ----

    def _restart_ranks(self, leaver: int, saved: str) -> None:
        """Start all ranks: cold from a saved file, or forked with their state in memory."""
        neighbour = self._files[(leaver + 1) % WORLD]
        for rank in range(WORLD):
            if saved:
                self._new_file(rank)
                self._start(rank, cold=True, copy_of=saved)
            elif rank == leaver:
                self._new_file(rank)
                self._start(rank, cold=False, copy_of=neighbour)
            else:
                self._start(rank, cold=False)

    def _new_file(self, rank: int) -> None:
        Path(self._files[rank]).rename(f"{self._folder}/old-{rank}")  # another process may still map or copy it
        self._files[rank] = f"{self._folder}/state-{self._generation}-{rank}"

    def _start(
        self, rank: int, *, cold: bool, copy_of: str = "", sender: int | None = None, fresh: bool = False
    ) -> None:
        role = Role(
            folder=str(self._folder),
            port=self._port,
            rank=rank,
            generation=self._generation,
            file=self._files[rank],
            copy_of=copy_of,
            sender=sender,
            fresh=fresh,
        )
        words = msgspec.json.encode(role).decode()
        if cold:
            command = [sys.executable, str(WORKER), words]
            output = self._output
            self._cold.append(subprocess.Popen(command, env=self._environment, stdout=output, stderr=output))
            pid = self._cold[-1].pid
        else:
            pid = self._zygote.fork(words)
        self._ends[rank] = os.pidfd_open(pid)

    def _write_change(self, generation: int, change: Change) -> None:
        path = change_file(str(self._folder), generation)
        partial = path.with_suffix(".partial")
        partial.write_bytes(msgspec.json.encode(change))
        partial.rename(path)

    def _wait_ends(self, ranks: list[int]) -> None:
        for rank in ranks:
            descriptor = self._ends.pop(rank)
            if not select.select([descriptor], [], [], DEADLINE_S)[0]:
                self._fail(f"rank {rank} does not end")
            os.close(descriptor)

    def _wait_steps(self) -> None:
        """Wait for some steps of the newest generation."""
        self._wait(lambda rows: sum(row.generation == self._generation for row in rows) > SETTLE_STEPS)

    def _wait(self, ready: Callable[[list[Row]], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not ready(self._rows()):
            if time.monotonic() > deadline or select.select(list(self._ends.values()), [], [], 0)[0]:
                self._fail("no progress, or a rank has ended")
            time.sleep(0.05)

    def _rows(self) -> list[Row]:
        path = self._folder / "rows"
        lines = path.read_bytes().splitlines() if path.exists() else []
        return [msgspec.json.decode(line, type=Row) for line in lines]

    def _fail(self, why: str) -> None:
        said = (self._folder / "output").read_text(errors="replace")[-3000:]
        raise SystemExit(f"plain torch: {why}:\n{said}")


class ZygoteConnection:
    """A zygote and the connection to it; its forked processes end with the connection."""

    def __init__(self, folder: Path, environment: dict[str, str], output: int) -> None:
        path = str(folder / "zygote.sock")
        self._process = start_zygote(path, environment=environment, preload=_PRELOAD)
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.settimeout(DEADLINE_S)
        self._connection.connect(path)
        socket.send_fds(self._connection, [encode_frame(Streams())], [output, output])
        self._decoder: FrameDecoder[ZygoteReply] = FrameDecoder(ZygoteReply)

    def fork(self, words: str) -> int:
        """Fork a worker; return its process ID."""
        self._connection.sendall(encode_frame(Fork(request=1, script=str(WORKER), args=(words,), cwd=os.getcwd())))
        while data := self._connection.recv(4096):
            for reply in self._decoder.feed(data):
                if isinstance(reply, Forked):
                    return reply.pid
        raise SystemExit("plain torch: the zygote has ended")

    def close(self) -> None:
        """End the zygote and the processes that it forked."""
        self._connection.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.reap()


if __name__ == "__main__":
    sys.exit(main())
