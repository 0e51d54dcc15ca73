"""Measure how long the local ranks of a replica group take to agree on a micro-batch.

The time runs from the last proposal until the last local rank continues. Each local rank is a process. Before each
agreement all processes meet over pipes and sleep a little, because real ranks arrive at different times. No other
system is compared: without an agreement, one local rank would wait for another in a forward pass.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection

from holdfast.control.link.replica_group.page import MappedProposals, ProposalPage
from holdfast.protocol.layouts.proposals import Proposal

FORK = multiprocessing.get_context("fork")


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agreements", type=int, default=2000, help="number of agreements to measure")
    parser.add_argument("--places", type=int, nargs="+", default=[2, 4], help="local ranks of a replica group")
    parser.add_argument("--apart", type=float, default=1e-3, help="largest difference between arrivals, in seconds")
    options = parser.parse_args()
    print(
        f"{'places':>6}  {'apart':>8}  {'median':>8}  {'mean':>8}  {'99 %':>8}  {'processor':>9}   (ms per agreement)"
    )
    for places in options.places:
        for apart_s in (0.0, options.apart):
            took, processor_s = measure(places, options.agreements, apart_s)
            rank = statistics.quantiles(took, n=100)
            figures = (statistics.median(took), statistics.fmean(took), rank[-1])
            print(f"{places:>6}  {apart_s * 1e3:>8.3f}  " + "  ".join(f"{1e3 * each:8.3f}" for each in figures), end="")
            print(f"  {1e3 * processor_s / places / options.agreements:9.3f}")


def measure(places: int, agreements: int, apart_s: float) -> tuple[list[float], float]:
    """Return the seconds from the last proposal to the end of each agreement, and all processes' processor time."""
    page = ProposalPage(places)
    pipes = [FORK.Pipe() for _ in range(places)]
    path = page.path

    def run(place: int, pipe: Connection) -> None:
        proposals, spent = MappedProposals(path, place=place, places=places), 0.0
        while (step := pipe.recv()) >= 0:
            if apart_s:
                time.sleep(apart_s * ((place + step) % places) / places)
            began, before = time.monotonic(), time.process_time()
            assert proposals.agree(Proposal(1, step, 0), lambda: True)
            ended = time.monotonic()
            spent += time.process_time() - before
            pipe.send((began, ended))
        pipe.send(spent)

    processes = [FORK.Process(target=run, args=(place, pipe)) for place, (_, pipe) in enumerate(pipes)]
    for process in processes:
        process.start()
    took: list[float] = []
    for step in range(agreements):
        for ours, _ in pipes:
            ours.send(step)
        times = [ours.recv() for ours, _ in pipes]
        took.append(max(ended for _, ended in times) - max(began for began, _ in times))
    for ours, _ in pipes:
        ours.send(-1)
    spent = sum(ours.recv() for ours, _ in pipes)
    for process in processes:
        process.join()
    page.close()
    return took, spent


if __name__ == "__main__":
    main()
