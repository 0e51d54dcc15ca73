"""Measure the cost of a pool's server with a thousand nodes and dozens of jobs.

    make bench-pool-scale

The server runs in its own process, as users run it, with the coordinators of all jobs. The nodes are fakes: real pool
fences and real agents of jobs over real connections, with workers that do not train
(`tests.simulation.fakes.fake_pool_nodes`). They share this machine with the server, so its *processor time* is the
figure that counts. All jobs have the same number of nodes. Then one more job is submitted, for which others give up
some nodes. The decision is made, written and reported within the request; the jobs' coordinators receive it afterwards.
As no job trains, no node leaves: benchmarks/pool.py measures moves.
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ending import end_in_order

from holdfast.control.pool_client import PoolClient
from holdfast.control.registry import JobEntry
from holdfast.control.store.etcd import MAX_KEPT_BYTES
from holdfast.control.store.store_choice import open_store
from holdfast.protocol.job_spec import JobSpec
from tests.simulation.fakes.fake_pool_nodes import FakePoolNodes, FakePoolPlace

PATIENCE_S = 240.0
#: Seconds within which all coordinators receive a decision.
HEARD_S = 3.0
MAX_ARRIVAL_S, MAX_IDLE = 1.0, 0.10
#: A script that does not exist on any node; it is never run.
SCRIPT = "/nowhere/train.py"


@dataclass(frozen=True, slots=True)
class Server:
    """A pool's server with a client."""

    process: subprocess.Popen[bytes]
    client: PoolClient
    place: FakePoolPlace

    @property
    def processor_s(self) -> float:
        """Processor time that all threads of the process have used."""
        return time.clock_gettime((~self.process.pid << 3) | 2)

    @property
    def peak_memory(self) -> int:
        """Peak resident memory of the process, in bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))


def main() -> int:
    """Run the benchmark and print its figures; return 1 if a limit is exceeded."""
    options = _options()
    end_in_order()
    names = [f"n{number}" for number in range(options.nodes)]
    place = tempfile.TemporaryDirectory(prefix="holdfast-bench-")
    with (
        place as folder,
        running_server(Path(folder)) as server,
        FakePoolNodes(server.place, names, processes=options.processes) as fakes,
    ):
        _start_jobs(server, fakes, options)
        wrong = _measure(server, options)
        wrong += _measure_sizes(Path(folder))
        again = fakes.look().connections - options.nodes
        print_figure("connections that were lost and made again", again, "")
        wrong += [f"{again} nodes lost their connection: this machine is too slow for these figures"] if again else []
        print_figure("server's memory, peak", server.peak_memory / (1 << 20), "MiB")
    print("wrong: " + ("; ".join(wrong) if wrong else "nothing"))
    return 1 if wrong else 0


def _start_jobs(server: Server, fakes: FakePoolNodes, options: argparse.Namespace) -> None:
    """Start all nodes, and all jobs with equal numbers of nodes."""
    each = options.nodes // options.jobs
    begun = server.processor_s
    fakes.start()
    fakes.until("all nodes", lambda look: look.here == options.nodes, timeout_s=PATIENCE_S)
    while len(server.client.status()["nodes"]) < options.nodes:  # each node is stored, one after the other
        time.sleep(0.1)
    print_figure("all nodes join, processor", server.processor_s - begun, "s")
    begun = server.processor_s
    for number in range(options.jobs):
        server.client.submit(make_job(f"j{number}", each, each))
    wanted = each * options.jobs
    fakes.until("all jobs", lambda look: sum(look.welcomed.values()) == wanted, timeout_s=PATIENCE_S)
    print_figure("all jobs start, their nodes join, processor", server.processor_s - begun, "s")
    for number in range(options.jobs):
        server.client.update(f"j{number}", {"min_nodes": max(1, each // 4)})
    time.sleep(HEARD_S)


def _measure(server: Server, options: argparse.Namespace) -> list[str]:
    """Measure idle seconds and the submission of a job; return the exceeded limits."""
    idle = _measure_idle(server, options.seconds)
    print_figure("idle, of a core", 100 * idle, f"% (<= {100 * MAX_IDLE:g})")
    decided, heard = _measure_arrival(server, idle, options.nodes // options.jobs)
    print_figure("a new job is decided, written and reported, processor", decided, f"s (<= {MAX_ARRIVAL_S:g})")
    print_figure("  and received by all jobs' coordinators", heard, "s")
    leaving = sum(node["leaving"] for node in server.client.status()["nodes"])
    print_figure("  nodes that must leave their jobs for it", leaving, "")
    wrong = ["idle"] if idle > MAX_IDLE else []
    wrong += ["arrival"] if heard > MAX_ARRIVAL_S else []
    return wrong if leaving else [*wrong, "no node must leave: nothing was decided"]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1024)
    parser.add_argument("--jobs", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=20.0, help="measured seconds without activity (default: 20)")
    parser.add_argument("--processes", type=int, default=2, help="processes that run the fake nodes (default: 2)")
    options = parser.parse_args()
    if not 2 <= options.jobs <= options.nodes // 4:
        parser.error(f"--jobs is {options.jobs}: give 2 at least, and a fourth of the nodes ({options.nodes}) at most")
    return options


def print_figure(what: str, value: float, unit: str) -> None:
    """Print a figure."""
    print(f"{what:55}{value:9.3f} {unit}", flush=True)


def make_job(name: str, least: int, most: int) -> JobSpec:
    """Return the specification of a job."""
    return JobSpec(name=name, script=SCRIPT, min_nodes=least, max_nodes=most)


@contextmanager
def running_server(folder: Path) -> Generator[Server]:
    """Run a pool's server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token, url = secrets.token_hex(16), f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "holdfast", "pool", "--listen", f"127.0.0.1:{port}"]
    command += ["--store", f"sqlite:{folder}/pool.db", "--journals", str(folder / "journals")]
    environment = {**os.environ, "HOLDFAST_TOKEN": token, "XDG_RUNTIME_DIR": str(folder)}
    log_path = folder / "pool.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while f"listens on {url}" not in log_path.read_text():
            if time.monotonic() > deadline or process.poll() is not None:
                raise RuntimeError(f"the pool's server does not come up:\n{log_path.read_text()}")
            time.sleep(0.02)
        entry = JobEntry(url=url, token=token, job="", pid=process.pid, pool="pool")
        with PoolClient(entry, timeout_s=PATIENCE_S) as client:
            yield Server(process, client, FakePoolPlace(url=url, token=token))
    finally:
        process.kill()
        process.wait()


def _measure_idle(server: Server, seconds: float) -> float:
    """Return the share of a core that the idle server uses."""
    begun, at = server.processor_s, time.monotonic()
    time.sleep(seconds)
    return (server.processor_s - begun) / (time.monotonic() - at)


def _measure_arrival(server: Server, idle: float, each: int) -> tuple[float, float]:
    """Submit a job; return the processor time until the answer, and until all received it, less the idle share."""
    begun, at = server.processor_s, time.monotonic()
    server.client.submit(make_job("late", max(1, each // 4), each))
    decided, took = server.processor_s - begun, time.monotonic() - at
    time.sleep(HEARD_S)
    return decided - idle * took, server.processor_s - begun - idle * (time.monotonic() - at)


def _measure_sizes(folder: Path) -> list[str]:
    """Print the sizes of the records; return the exceeded limits."""
    with closing(open_store(f"sqlite:{folder}/pool.db")) as store:
        entry = store.get("pool/record")
        assert entry is not None
        packed = len(zlib.compress(entry.value, 1))
        print_figure("the pool's record", len(entry.value) / 1000, "kB")
        print_figure("  compressed, as etcd has it", packed / 1000, f"kB (<= {MAX_KEPT_BYTES / 1000:g})")
        jobs = [len(one.value) for one in store.list("jobs/").entries.values()]
        print_figure("the largest of the jobs' records", max(jobs, default=0) / 1000, "kB")
    return ["the record is too large for etcd"] if packed > MAX_KEPT_BYTES else []


if __name__ == "__main__":
    sys.exit(main())
