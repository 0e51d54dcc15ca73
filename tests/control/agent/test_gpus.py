"""The GPU facts that an agent reports, read from a fake driver module."""

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
#: This GPU is old: the driver has no throttling, ECC or Xid data for it.
SECOND = GpuFacts(
    index=1, name="Fake GPU 101", memory_used=3_000_000_000, memory_total=80_000_000_000, temperature_c=41
)


@pytest.fixture(autouse=True)
def _fake_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_pynvml)
    monkeypatch.setattr(fake_pynvml, "XIDS", list(fake_pynvml.XIDS))
    monkeypatch.setattr(fake_pynvml, "LOST", set[int]())
    monkeypatch.setattr(fake_pynvml, "SHARED_MEMORY", set[int]())


def test_the_facts_of_each_gpu_are_read() -> None:
    reader = GpuReader(fake_pynvml)
    assert reader.count == 2
    assert reader.read()[0].xids == ()
    assert reader.collect_xids()
    assert reader.read() == (FIRST, SECOND)
    assert not reader.collect_xids(), "each error must be collected only once"


def test_a_lost_gpu_is_reported_as_a_problem() -> None:
    reader = GpuReader(fake_pynvml)
    fake_pynvml.LOST.add(101)
    _, lost = reader.read()
    assert lost == GpuFacts(index=1, name="Fake GPU 101", problem="GPU is lost")


def test_the_xid_error_of_a_lost_gpu_is_reported() -> None:
    """The driver no longer knows its index: Xid 79 reports that the GPU has fallen off the bus."""
    reader = GpuReader(fake_pynvml)
    fake_pynvml.LOST.add(100)
    fake_pynvml.XIDS[:] = [fake_pynvml.Event(device=100, eventData=79)]
    assert reader.collect_xids()
    assert reader.read()[0] == GpuFacts(index=0, name="Fake GPU 100", xids=(79,), problem="GPU is lost")


def test_a_gpu_lost_before_the_agent_starts_is_reported_as_a_problem() -> None:
    fake_pynvml.LOST.add(100)
    lost, other = GpuReader(fake_pynvml).read()
    assert lost == GpuFacts(index=0, problem="GPU is lost")
    assert other == SECOND


def test_a_gpu_with_shared_memory_is_not_a_problem() -> None:
    fake_pynvml.SHARED_MEMORY.add(101)
    assert GpuReader(fake_pynvml).read()[1] == GpuFacts(index=1, name="Fake GPU 101", temperature_c=41)


def test_only_the_newest_xid_errors_are_kept() -> None:
    reader = GpuReader(fake_pynvml)
    fake_pynvml.XIDS[:] = [fake_pynvml.Event(device=100, eventData=number) for number in range(40)]
    while reader.collect_xids():
        pass
    assert reader.read()[0].xids == tuple(range(24, 40))


def test_nvml_is_not_loaded_without_its_package_or_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise fake_pynvml.NVMLError("Driver Not Loaded")

    monkeypatch.setattr(fake_pynvml, "nvmlInit", fail)
    assert load_nvml() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert load_nvml() is None


@pytest.mark.parametrize("loaded", [None, "no GPUs"])
def test_the_watching_thread_ends_if_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch, loaded: str | None) -> None:
    monkeypatch.setattr(fake_pynvml, "nvmlDeviceGetCount", lambda: 0)
    before = set(threading.enumerate())
    watch_gpus(lambda _: pytest.fail("there is no GPU to report"), load=lambda: fake_pynvml if loaded else None)
    for thread in set(threading.enumerate()) - before:
        thread.join(10.0)
        assert not thread.is_alive()


def test_an_xid_error_is_reported_at_the_next_check() -> None:
    reports: list[tuple[GpuFacts, ...]] = []
    fake_pynvml.XIDS.clear()
    both = threading.Event()

    def on_read(gpus: tuple[GpuFacts, ...]) -> None:
        reports.append(gpus)
        if len(reports) == 1:
            fake_pynvml.XIDS.append(fake_pynvml.Event(device=100, eventData=79))
        else:
            both.set()

    stop = watch_gpus(on_read, load=lambda: fake_pynvml, poll_s=0.01)
    assert both.wait(10.0)
    stop.set()
    assert [gpus[0].xids for gpus in reports[:2]] == [(), (79,)]


def test_an_agent_reports_its_gpus_to_the_coordinator() -> None:
    async def story(coordinator: FakeCoordinator, agent: Agent, running: asyncio.Task[int]) -> None:
        await coordinator.attach()
        await coordinator.until(lambda: coordinator.of(GpusRead), "the GPUs")
        assert coordinator.of(GpusRead)[0].gpus == (FIRST, SECOND)
        await coordinator.send(EndNode(exit_code=0, why="over"))
        await running

    play(story)
