"""The page of a replica group's proposals between real processes that are really killed."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from holdfast.control.link.replica_group.page import MappedProposals, ProposalPage
from holdfast.protocol.layouts.proposals import Proposal

FORK = multiprocessing.get_context("fork")
DEADLINE_S = 60.0
STEPS = 40
Body = Callable[[MappedProposals, Path], None]


@contextmanager
def unit(bodies: list[Body], folder: Path) -> Iterator[list[BaseProcess]]:
    """Run one process per local rank, each with its own file; none is left afterwards."""
    page, places = ProposalPage(len(bodies)), len(bodies)
    path = page.path

    def run(place: int, body: Body) -> None:
        body(MappedProposals(path, place=place, places=places), folder / f"place-{place}")

    processes: list[BaseProcess] = [FORK.Process(target=run, args=item) for item in enumerate(bodies)]
    try:
        for process in processes:
            process.start()
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()
        page.close()


def wait_for(file: Path, what: str = "") -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not file.exists() or what not in file.read_text():
        assert time.monotonic() < deadline, f"{file} does not contain {what!r}"
        time.sleep(0.001)


def fickle(place: int, places: int, seed: int, last: int, proposals: MappedProposals, file: Path) -> None:
    """Propose one step after the other; at some steps one randomly drawn local rank withdraws soon.

    The ranks draw alike. A rank that is left alone withdraws as well. At step `last`, all live ranks wait forever.
    """
    rng = random.Random(seed)
    with file.open("w", buffering=1) as log:
        for step in range(STEPS):
            leaves, soon = rng.randrange(2 * places), rng.randrange(3)
            looks = iter(range(soon if leaves == place else 20 if leaves < places else 100))
            wants = partial(next, looks, None) if step != last else lambda: 0
            went = proposals.agree(Proposal(1, step, 0), lambda wants=wants: wants() is not None)
            log.write(f"{step} {'went' if went else 'left'}\n")


def logged(folder: Path, places: int) -> list[dict[str, str]]:
    """Return each local rank's log of its steps."""
    lines = ((folder / f"place-{place}").read_text().splitlines() for place in range(places))
    return [dict(line.split() for line in place if line[-4:] in ("went", "left")) for place in lines]


def went(log: dict[str, str]) -> list[str]:
    return [step for step, what in log.items() if what == "went"]


@pytest.mark.parametrize("places", [2, 4])
def test_all_processes_agree_or_none_does(places: int, tmp_path: Path) -> None:
    """The processes drift apart and meet again: a rank left alone withdraws, and reaches the others' step."""
    with unit([partial(fickle, place, places, 1, STEPS - 1) for place in range(places)], tmp_path) as processes:
        for process in processes:
            process.join(DEADLINE_S)
            assert process.exitcode == 0
    first, *others = logged(tmp_path, places)
    assert len(first) == STEPS
    assert str(STEPS - 1) in went(first)
    for other in others:
        assert other == first


@pytest.mark.parametrize("seed", range(6))
def test_a_killed_rank_does_not_block_the_other_ranks(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    victim, after = rng.randrange(3), rng.randrange(30)
    with unit([partial(fickle, place, 3, seed, -1) for place in range(3)], tmp_path) as processes:
        wait_for(tmp_path / f"place-{victim}", f"{after} ")
        time.sleep(rng.random() * 0.002)
        processes[victim].kill()
        for process in processes:
            process.join(DEADLINE_S)
        assert [process.exitcode for place, process in enumerate(processes) if place != victim] == [0, 0]
    logs = logged(tmp_path, 3)
    one, other = (log for place, log in enumerate(logs) if place != victim)
    assert one == other
    assert set(went(logs[victim])) <= set(went(one))
    # The victim may have agreed to one step without logging it.
    assert len(set(went(one)) - set(went(logs[victim]))) <= 1


def test_a_process_killed_inside_the_lock_releases_it(tmp_path: Path) -> None:
    def holds(proposals: MappedProposals, file: Path) -> None:
        with proposals._lock:
            file.write_text("holds")
            time.sleep(DEADLINE_S)

    def wants(proposals: MappedProposals, file: Path) -> None:
        wait_for(tmp_path / "place-0", "holds")
        file.write_text("wants")
        assert not proposals.agree(Proposal(1, 1, 0), lambda: False)
        file.write_text("left")

    with unit([holds, wants], tmp_path) as processes:
        wait_for(tmp_path / "place-1", "wants")
        assert processes[1].is_alive()
        processes[0].kill()
        processes[1].join(DEADLINE_S)
        assert (processes[1].exitcode, (tmp_path / "place-1").read_text()) == (0, "left")


def test_an_invalid_or_missing_page_is_refused(tmp_path: Path) -> None:
    (tmp_path / "page").write_bytes(b"x")
    with pytest.raises(OSError, match="is not a page for 2 workers"):
        MappedProposals(str(tmp_path / "page"), place=0, places=2)
    with pytest.raises(FileNotFoundError):
        MappedProposals(str(tmp_path / "none"), place=0, places=2)


def test_a_second_proposal_before_withdrawal_is_refused() -> None:
    page = ProposalPage(2)
    mine = MappedProposals(page.path, place=0, places=2)
    assert not mine.propose(Proposal(1, 1, 0))
    with pytest.raises(RuntimeError, match="another proposal stands"):
        mine.propose(Proposal(1, 1, 1))
    assert mine.withdraw()
    assert not mine.propose(Proposal(1, 1, 1))
    page.close()
