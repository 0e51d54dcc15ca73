"""Placement searches in their own process: their results, and processes that die or never finish."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from holdfast.control.coordinator.placement_search_process import make_searcher
from holdfast.control.separate_process import BackgroundSolver
from holdfast.coordination.experts.placing import PlacementQuestion, compute_placement, keep_placement
from holdfast.coordination.experts.searching import PlacementAnswer, PlacementSearch
from holdfast.coordination.inputs import Planned
from holdfast.planning import Shortage
from holdfast.protocol.plan import ExpertShape

PATIENCE_S = 60.0
Searcher = BackgroundSolver[PlacementSearch, PlacementAnswer]


def search(generation: int = 1, *, within_s: float = PATIENCE_S) -> PlacementSearch:
    shape = ExpertShape(layers=2, experts=8, slots=6)
    workers = tuple(f"n{number}/0/a" for number in range(4))
    first = compute_placement(question(shape, workers, (b"",) * 4))
    assert not isinstance(first, Shortage)
    mended = keep_placement(question(shape, workers[:3], first.placement[:3]))
    assert mended is not None
    assert not isinstance(mended, Shortage)
    return PlacementSearch(
        generation=generation,
        step=7,
        question=question(shape, workers[:3], mended.placement),
        repaired=True,
        token_s=1e-3,
        expert_bytes=100,
        bandwidth=1e9,
        pause_s=0.1,
        hidden_s=0.0,
        horizon=200,
        within_s=within_s,
    )


def question(shape: ExpertShape, workers: tuple[str, ...], held: tuple[bytes, ...]) -> PlacementQuestion:
    return PlacementQuestion(
        shape=shape, workers=workers, held=held, slots=(6,) * len(workers), fault_threshold=2, strategy="best"
    )


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def play(story: Callable[[Searcher, asyncio.Queue[Planned]], Awaitable[None]]) -> None:
    """Run a story with a searcher, and check that no search process is left."""

    async def run() -> None:
        before, answers = children(), asyncio.Queue[Planned]()
        searcher = make_searcher(answers.put_nowait)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await story(searcher, answers)
        finally:
            await searcher.close()
        assert children() <= before
        assert answers.empty()

    asyncio.run(run())


async def process_of(searcher: Searcher, before: set[int]) -> int:
    while not (new := children() - before):
        await asyncio.sleep(0)
    return new.pop()


def test_a_background_search_finds_the_same_result_as_a_local_search() -> None:
    async def story(searcher: Searcher, answers: asyncio.Queue[Planned]) -> None:
        searcher.start(search())
        assert await answers.get() == Planned(1, search().solve())

    play(story)


def test_a_killed_search_returns_no_result_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def story(searcher: Searcher, answers: asyncio.Queue[Planned]) -> None:
        before = children()
        searcher.start(search())
        os.kill(await process_of(searcher, before), signal.SIGKILL)
        assert await answers.get() == Planned(1, None)

    play(story)
    assert "the search for a placement of the experts has ended with SIGKILL" in caplog.text


def test_a_stopped_search_is_killed_at_its_time_limit(caplog: pytest.LogCaptureFixture) -> None:
    """Without its end, the job would not search for a better placement until the next generation."""

    async def story(searcher: Searcher, answers: asyncio.Queue[Planned]) -> None:
        before = children()
        searcher.start(search(within_s=3.0))
        stuck = await process_of(searcher, before)
        os.kill(stuck, signal.SIGSTOP)
        assert await answers.get() == Planned(1, None)
        assert stuck not in children()

    play(story)
    assert "the search for a placement of the experts is killed, because it has taken more than 3 s" in caplog.text


@pytest.mark.parametrize("answer", ["", "\\xc1", "\\x81\\xa5adopt\\x01"])
def test_a_search_with_an_unreadable_result_returns_no_result(answer: str, caplog: pytest.LogCaptureFixture) -> None:
    async def story(searcher: Searcher, answers: asyncio.Queue[Planned]) -> None:
        searcher.code = f"import os, sys; os.write(int(sys.argv[2]), b'{answer}')"
        searcher.start(search())
        assert await answers.get() == Planned(1, None)

    play(story)
    assert "the result of the search for a placement of the experts cannot be read" in caplog.text


def test_an_endless_search_is_killed_by_the_next_search_and_on_close() -> None:
    async def story(searcher: Searcher, answers: asyncio.Queue[Planned]) -> None:
        before = children()
        searcher.start(search(1))
        stuck = await process_of(searcher, before)
        os.kill(stuck, signal.SIGSTOP)
        searcher.start(search(2))
        assert (await answers.get()).generation == 2
        assert stuck not in children()
        searcher.start(search(3))
        os.kill(await process_of(searcher, before), signal.SIGSTOP)

    play(story)
