"""Check that a thousand unknown clients at the coordinator's port neither delay training nor block new agents.

    make bench-strangers

While a job trains, three kinds of periods alternate: without such clients; with clients at the port of a program that
only drops them, which shows their cost on the shared machine; with clients at the coordinator's port. A third of the
clients is silent, a third sends the head of a request one byte at a time, and a third stops in the middle of a
WebSocket handshake. Each connects again a second after it was dropped. New agents connect once a second and send a
Hello during all periods. At the end one node joins without clients, and another one with them. All connections use the
loopback interface.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import secrets
import statistics
import sys
import threading
import time
from collections.abc import Generator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from holdfast.control.agent.channel import open_channel
from holdfast.control.launch.settings import script_digest
from holdfast.control.registry import JobEntry, find_job, registry_directory
from holdfast.protocol.events import NodesJoined, StepCommitted
from holdfast.protocol.messages.agent import CoordinatorMessage, Hello, Welcome
from holdfast.protocol.names import PROTOCOL
from tests.harness.local_job import LocalJob

ROOT = Path(__file__).resolve().parent.parent
DENSE = ROOT / "examples" / "dense_gpt.py"
ARGS = ("--steps", "1000000", "--layers", "4", "--dim", "128", "--heads", "4", "--context", "16")
SLOW_BYTE_S = 1.0
AGAIN_S = 1.0
HELLO_EVERY_S = 1.0
MOST_S = 600.0
TIME_TO_SHOW_S = 5.0
NOBODY, ELSEWHERE, HERE = KINDS = ("nobody", "strangers elsewhere", "strangers here")
MAX_JOIN_S = 2.0
MAX_SLOWER = 1.25
MAX_LINES_A_MINUTE = 60

WORDS = (
    b"",
    b"GET /status HTTP/1.1\r\nX-Slow: " + b"a" * 2000,
    b"GET /agent HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n",
)


def main() -> int:
    """Run the benchmark; return 1 if the clients did harm."""
    options = _options()
    args = tuple(options.args or ARGS)
    digest = script_digest(options.script, args)
    run = LocalJob(options.script, args, options=("--nodes", str(options.nodes)))
    with run as job:
        job.wait(StepCommitted, step=20)
        entry = find_job(registry_directory(job.environment), job.url)
        periods: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
        hellos: dict[str, list[float]] = {kind: [] for kind in KINDS}
        with dropping_server() as elsewhere:
            urls = {NOBODY: "", ELSEWHERE: elsewhere, HERE: entry.url}
            for kind in KINDS * options.turns:
                with running_strangers(urls[kind], options.strangers):
                    began = time.time()
                    hellos[kind] += connect_agents(entry, digest, options.seconds)
                    periods[kind].append((began, time.time()))
        joined = {NOBODY: add_node(job)}
        with running_strangers(entry.url, options.strangers):
            joined[HERE] = add_node(job)
        steps = {kind: steps_in(job, spans) for kind, spans in periods.items()}
        lines = [
            line for line in job.output().splitlines() if "holdfast.coordinator" in line or "more like this" in line
        ]
        return report(steps, hellos, joined, lines, options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strangers", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds of one period")
    parser.add_argument("--turns", type=int, default=3, help="periods of each kind")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--script", type=Path, default=DENSE)
    parser.add_argument("args", nargs="*", help="arguments of the script, after --")
    return parser.parse_args()


# ---- strangers ----


@contextlib.contextmanager
def running_strangers(url: str, count: int) -> Generator[None]:
    """Run this many clients in a separate process, all of them connected before the body starts; none for ""."""
    if not url:
        yield
        return
    context = multiprocessing.get_context("spawn")
    there = context.Event()
    process = context.Process(target=run_clients, args=(url, count, there), daemon=True)
    process.start()
    try:
        there.wait(60)
        yield
    finally:
        process.terminate()
        process.join(20)


@contextlib.contextmanager
def dropping_server() -> Generator[str]:
    """Yield the URL of a program that accepts clients, and drops them after the coordinator's time limit."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve_drops, args=(theirs,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.terminate()
        process.join(20)


def serve_drops(pipe: Connection) -> None:
    """Run the program that only drops clients."""

    async def drop(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(TimeoutError, OSError):
            await asyncio.wait_for(reader.read(-1), TIME_TO_SHOW_S)
        writer.transport.abort()

    async def run() -> None:
        server = await asyncio.start_server(drop, "127.0.0.1", 0, backlog=4096)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


def run_clients(url: str, count: int, there: threading.Event) -> None:
    """Run the clients for a limited time."""
    os.nice(19)  # real clients would run on other machines
    host, port = url.split("//")[1].rsplit(":", 1)

    async def run() -> None:
        tasks = [
            asyncio.create_task(connect_repeatedly(host, int(port), WORDS[number % len(WORDS)]))
            for number in range(count)
        ]
        await asyncio.sleep(AGAIN_S)
        there.set()
        await asyncio.wait(tasks, timeout=MOST_S)

    asyncio.run(run())


async def connect_repeatedly(host: str, port: int, words: bytes) -> None:
    """Connect again and again."""
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(host, port)
            talking = asyncio.create_task(send_text(writer, words))
            await reader.read()
            talking.cancel()
            writer.transport.abort()
        await asyncio.sleep(AGAIN_S)


async def send_text(writer: asyncio.StreamWriter, words: bytes) -> None:
    """Send short text at once, and long text one byte at a time."""
    if len(words) < 1000:
        writer.write(words)
        return
    for place in range(len(words)):
        if writer.is_closing():
            return
        writer.write(words[place : place + 1])
        await asyncio.sleep(SLOW_BYTE_S)


# ---- agents ----


def connect_agents(entry: JobEntry, digest: str, seconds: float) -> list[float]:
    """Connect new agents for a while; return the seconds that each waited for its Welcome."""

    async def once(number: int) -> float:
        welcomed: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        began = time.monotonic()

        def on_message(message: CoordinatorMessage) -> None:
            if isinstance(message, Welcome) and not welcomed.done():
                welcomed.set_result(time.monotonic() - began)

        channel = await open_channel(entry.url, entry.token, on_message)
        node = f"hello-{number}"
        channel.send(
            Hello(
                protocol=PROTOCOL,
                job=entry.job,
                node=node,
                session=secrets.token_hex(8),
                term=0,
                agent_pid=os.getpid(),
                workers=1,
                digest=digest,
            )
        )
        try:
            return await asyncio.wait_for(welcomed, 30)
        finally:
            channel.close()
            await channel.wait_closed()

    async def all_of_them() -> list[float]:
        found: list[float] = []
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            found.append(await once(len(found)))
            await asyncio.sleep(HELLO_EVERY_S)
        return found

    return asyncio.run(all_of_them())


def add_node(job: LocalJob) -> float:
    """Add a node; return the seconds from the request until all its workers are attached."""
    since = len(job.events)
    began = time.time()
    with job.client() as client:
        client.add_nodes()
    return float(job.wait(NodesJoined, since=since).time) - began


# ---- figures ----


def steps_in(job: LocalJob, spans: Sequence[tuple[float, float]]) -> list[float]:
    """Return the seconds of the steps within the periods."""
    committed = job.all(StepCommitted)
    return [e.step_s for e in committed if any(a <= e.time - e.step_s and e.time <= b for a, b in spans)]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which this share of the values lies."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def report(
    steps: dict[str, list[float]],
    hellos: dict[str, list[float]],
    joined: dict[str, float],
    lines: list[str],
    options: argparse.Namespace,
) -> int:
    """Print the table; return 1 if the clients did harm."""
    print(f"{'':24}{'steps':>7}{'median':>9}{'p99':>9}{'max':>9}   {'hellos':>7}{'median':>9}{'max':>9}")
    for kind in KINDS:
        took, waited = steps[kind], hellos[kind]
        print(
            f"{kind:24}{len(took):7}{statistics.median(took) * 1e3:6.0f} ms{percentile(took, 0.99) * 1e3:6.0f} ms"
            f"{max(took) * 1e3:6.0f} ms   {len(waited):7}{statistics.median(waited) * 1e3:6.0f} ms"
            f"{max(waited) * 1e3:6.0f} ms"
        )
    late = {kind: percentile(took, 0.99) for kind, took in steps.items()}
    slower = late[HERE] / late[NOBODY]
    print(
        f"99th percentile of steps: {slower:.2f}x the one with nobody, {late[HERE] / late[ELSEWHERE]:.2f}x the one "
        f"with strangers elsewhere; a node joined in {joined[NOBODY]:.2f} s, among strangers in {joined[HERE]:.2f} s; "
        f"{len(lines)} log lines, the last:"
    )
    for line in lines[-3:]:
        print("  " + line)
    wrong: list[str] = []
    if slower > MAX_SLOWER:
        wrong.append(f"steps take {slower:.2f}x")
    if max(*hellos[HERE], joined[HERE]) > MAX_JOIN_S:
        wrong.append("an agent waited too long")
    if len(lines) > MAX_LINES_A_MINUTE * (options.turns * options.seconds / 60 + 1):
        wrong.append("the log is flooded")
    print("wrong: " + ("; ".join(wrong) if wrong else "nothing"))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
