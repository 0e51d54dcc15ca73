"""What the agent reports of GPUs, with a module that stands for the driver's."""

from __future__ import annotations

import asyncio
import sys
import threading

import fake_pynvml
import pytest
from agent_harness import FakeCoordinator, play

from holdfast.control.agent.gpus import GpuReader, load_nvml, watch_gpus
from holdfast.control.agent.node_agent import Agent
from holdfast.protocol.messages.agent import EndNode, GpusRead
from holdfast.protocol.messages.gpus import GpuFacts

FIRST = GpuFacts(
    index=0,
    name="Fake GPU 100",
    memory_used=3_000_000_000,
    memory_total=80_000_000_000,
    temperature_c=40,
    throttled="heat (hardware)",
    ecc_errors=2,
    xids=(31, 79),
)
#: It is old: the driver knows of no throttling, ECC or Xid errors.
SECOND = GpuFacts(
    index=1, name="Fake GPU 101", memory_used=3_000_000_000, memory_total=80_000_000_000, temperature_c=41
)


@pytest.fixture(autouse=True)
def _fake_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_pynvml)
    monkeypatch.setattr(fake_pynvml, "XIDS", list(fake_pynvml.XIDS))
    monkeypatch.setattr(fake_pynvml, "LOST", set[int]())


def test_the_facts_of_each_gpu() -> None:
    reader = GpuReader(fake_pynvml)
    assert reader.count == 2
    assert reader.read()[0].xids == ()
    assert reader.take_xids()
    assert reader.read() == (FIRST, SECOND)
    assert not reader.take_xids(), "each error is taken once"


def test_a_lost_gpu_is_a_problem_and_the_other_is_read() -> None:
    reader = GpuReader(fake_pynvml)
    fake_pynvml.LOST.add(101)
    _, lost = reader.read()
    assert lost == GpuFacts(index=1, name="Fake GPU 101", problem="GPU is lost")


def test_only_the_newest_errors_are_kept() -> None:
    reader = GpuReader(fake_pynvml)
    fake_pynvml.XIDS[:] = [fake_pynvml.Event(device=100, eventData=number) for number in range(40)]
    while reader.take_xids():
        pass
    assert reader.read()[0].xids == tuple(range(24, 40))


def test_without_the_package_or_a_driver_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise fake_pynvml.NVMLError("Driver Not Loaded")

    monkeypatch.setattr(fake_pynvml, "nvmlInit", fail)
    assert load_nvml() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert load_nvml() is None


@pytest.mark.parametrize("loaded", [None, "no GPUs"])
def test_the_thread_ends_if_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch, loaded: str | None) -> None:
    monkeypatch.setattr(fake_pynvml, "nvmlDeviceGetCount", lambda: 0)
    before = set(threading.enumerate())
    watch_gpus(lambda _: pytest.fail("nothing can be told"), load=lambda: fake_pynvml if loaded else None)
    for thread in set(threading.enumerate()) - before:
        thread.join(10.0)
        assert not thread.is_alive()


def test_an_error_is_told_at_the_next_look() -> None:
    told: list[tuple[GpuFacts, ...]] = []
    fake_pynvml.XIDS.clear()
    both = threading.Event()

    def tell(gpus: tuple[GpuFacts, ...]) -> None:
        told.append(gpus)
        if len(told) == 1:
            fake_pynvml.XIDS.append(fake_pynvml.Event(device=100, eventData=79))
        else:
            both.set()

    stop = watch_gpus(tell, load=lambda: fake_pynvml, look_s=0.01)
    assert both.wait(10.0)
    stop.set()
    assert [gpus[0].xids for gpus in told[:2]] == [(), (79,)]


def test_an_agent_tells_its_coordinator() -> None:
    async def story(coordinator: FakeCoordinator, agent: Agent, running: asyncio.Task[int]) -> None:
        await coordinator.attach()
        await coordinator.until(lambda: coordinator.of(GpusRead), "the GPUs")
        assert coordinator.of(GpusRead)[0].gpus == (FIRST, SECOND)
        await coordinator.say(EndNode(exit_code=0, why="over"))
        await running

    play(story)
