"""Measure how fast state moves to a joining worker: two checked streams, compared with one raw TCP stream.

python benchmarks/transfer.py [--megabytes 64 512] [--repeats 5]
"""

from __future__ import annotations

import argparse
import multiprocessing
import queue
import socket
import statistics
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

from holdfast.protocol.plan import GenerationPlan, Member
from holdfast.protocol.state import LiveSource, StateSource
from holdfast.runtime.state.receive import StateInbox, StateReceiver
from holdfast.runtime.state.state import TrainingState
from holdfast.runtime.state.transfer import StateSender
from holdfast.runtime.state.wire import Offer, Ticket

SENDER, RECEIVER = "n1/0/a", "n2/0/b"
MICRO = 1 << 20


def reports_to(outcome: queue.Queue[str]) -> Callable[[str, str], None]:
    """Return a callback for the end of a transfer that puts the error, or "", into a queue."""

    def on_end(error: str, _peer: str) -> None:
        outcome.put(error)

    return on_end


def make_state(megabytes: int) -> TrainingState:
    """Return a state of this size: layers of 4 MiB and one small tensor each."""
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(megabytes // 4)))
    return TrainingState(model, torch.optim.SGD(model.parameters()))


def plan_of(generation: int, port: int) -> GenerationPlan:
    members = tuple(Member(worker=worker, host="127.0.0.1", state_port=port) for worker in (SENDER, RECEIVER))
    sources: dict[str, StateSource] = {RECEIVER: LiveSource(members=(SENDER,))}
    return GenerationPlan(term=1, generation=generation, members=members, sources=sources, secret=b"s" * 32)


def run_receiver(pipe: Connection, megabytes: int, repeats: int) -> None:
    """Run the joining worker: one receiver per generation, then the same bytes over one raw stream."""
    torch.set_num_threads(1)
    state = make_state(megabytes)
    receipts: dict[int, StateReceiver] = {}
    lock = threading.Lock()
    ended: queue.Queue[int] = queue.Queue()

    def admit(offer: Offer, wait_s: float) -> Ticket:
        return Ticket(plan=plan_of(offer.generation, inbox_port), sender=SENDER, receiver=RECEIVER)

    def open_receipt(ticket: Ticket) -> StateReceiver:
        generation = ticket.plan.generation
        with lock:
            if generation not in receipts:
                receipts[generation] = StateReceiver(
                    ticket=ticket, prepare=state.prepare, on_end=lambda: ended.put(generation)
                )
            return receipts[generation]

    inbox = StateInbox("127.0.0.1", admit=admit, open_receiver=open_receipt)
    inbox_port = inbox.start()
    pipe.send(inbox_port)
    for generation in range(1, repeats + 2):
        while not (generation in receipts and receipts[generation].has_ended):
            ended.get()
        header = receipts[generation].result()
        state.adopt(header.manifest, receipts[generation].tensors)
        pipe.send(receipts[generation].nbytes)
    inbox.close()
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname()[1])
        buffer = bytearray(megabytes * MICRO)
        for _ in range(repeats + 1):
            connection, _ = server.accept()
            view = memoryview(buffer)
            while view:
                view = view[connection.recv_into(view) :]
            connection.close()
            pipe.send("done")


def measure(megabytes: int, repeats: int) -> tuple[list[float], list[float]]:
    """Return GB/s of our transfers and of raw ones, without the first of each."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=run_receiver, args=(there, megabytes, repeats))
    process.start()
    port = here.recv()
    view = make_state(megabytes).capture()
    ours: list[float] = []
    raw: list[float] = []
    for generation in range(1, repeats + 2):
        outcome: queue.Queue[str] = queue.Queue()
        started = time.perf_counter()
        StateSender(
            plan=plan_of(generation, port),
            sender=SENDER,
            receivers=(RECEIVER,),
            view=view,
            step=1,
            passed=(),
            on_end=reports_to(outcome),
        ).start()
        assert outcome.get() == ""
        nbytes = here.recv()
        ours.append(nbytes / (time.perf_counter() - started) / 1e9)
    port = here.recv()
    payload = bytes(megabytes * MICRO)
    for _ in range(repeats + 1):
        started = time.perf_counter()
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(payload)
            here.recv()
        raw.append(len(payload) / (time.perf_counter() - started) / 1e9)
    process.join()
    return ours[1:], raw[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("state MB | checked, two streams, GB/s: median (min..max) | one raw TCP stream, unchecked")
    for megabytes in args.megabytes:
        cells = [
            f"{statistics.median(rates):.2f} ({min(rates):.2f}..{max(rates):.2f})"
            for rates in measure(megabytes, args.repeats)
        ]
        print(f"{megabytes:8d} | {cells[0]:50s} | {cells[1]}")


if __name__ == "__main__":
    main()
