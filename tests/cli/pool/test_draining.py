"""Tests of a rolling drain of a pool's nodes: each one leaves, and the command waits for its return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from holdfast.cli.pool import draining
from holdfast.cli.pool.draining import drain_of_pool
from holdfast.control.client import SilentError
from holdfast.control.pool_client import PoolClient
from holdfast.errors import UnreachableError


class FakePool(PoolClient):
    """A pool in which the next scripted action runs at each query."""

    def __init__(self, **jobs: str) -> None:
        self.nodes = {
            name: {"node": name, "job": job, "here": True, "drained": False, "leaving": False, "session": "a"}
            for name, job in jobs.items()
        }
        self.asked: list[str] = []
        self.next: list[Callable[[], None]] = []

    def __enter__(self) -> FakePool:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def status(self) -> dict[str, Any]:
        if self.next:
            self.next.pop(0)()
        return {"nodes": [dict(node) for node in self.nodes.values()]}

    def drain(self, nodes: Sequence[str]) -> None:
        if nodes[0] not in self.nodes:
            raise UnreachableError(f"there is no node {nodes[0]!r}")
        self.asked += [f"drain {node}" for node in nodes]
        self.nodes[nodes[0]]["drained"] = True

    def undrain(self, nodes: Sequence[str]) -> None:
        self.asked += [f"undrain {node}" for node in nodes]
        self.nodes[nodes[0]]["drained"] = False

    def then(self, *steps: Callable[[], None]) -> None:
        self.next += steps

    def left(self, node: str) -> Callable[[], None]:
        return lambda: self.nodes[node].update(job="")

    def anew(self, node: str) -> Callable[[], None]:
        return lambda: self.nodes[node].update(session="b", here=True)

    def gone(self, node: str) -> Callable[[], None]:
        return lambda: self.nodes[node].update(here=False)

    def forgotten(self, node: str) -> Callable[[], None]:
        return lambda: (self.nodes.pop(node), None)[1]

    def comes(self, node: str) -> Callable[[], None]:
        return lambda: self.nodes.update(FakePool(**{node: ""}).nodes)

    @staticmethod
    def away() -> None:
        raise SilentError("nobody answers")


def nothing() -> None:
    pass


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining.time, "sleep", lambda _: None)


def roll(pool: FakePool, job: str = "") -> None:
    drain_of_pool(pool, "roll", (), job=job, no_wait=False, as_json=False)
    assert not pool.next, "not all scripted actions have run"


def test_a_rolling_drain_waits_for_each_node_before_the_next(capsys: pytest.CaptureFixture[str]) -> None:
    pool = FakePool(n1="one", n2="one", n3="two")
    pool.nodes["n3"]["drained"] = True
    pool.then(nothing, nothing, nothing, pool.left("n1"), nothing, pool.gone("n1"), pool.anew("n1"), nothing)
    pool.then(nothing, pool.left("n2"), nothing, lambda: pool.undrain(["n2"]))
    roll(pool)
    assert pool.asked == ["drain n1", "undrain n1", "drain n2", "undrain n2"]
    said = capsys.readouterr().out
    assert "n3 is left out: it is drained already" in said
    assert "n1 waits: job one keeps it" in said
    assert "the next one follows once its agent is restarted, or at `holdfast undrain n1`" in said
    assert said.index("n1 is back (1 of 2)") < said.index("n2 is drained") < said.index("n2 is back (2 of 2)")


def test_a_rolling_drain_of_a_job_drains_only_its_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    pool = FakePool(n1="one", n2="two")
    pool.then(nothing, nothing, pool.left("n2"), pool.anew("n2"), nothing)
    roll(pool, "two")
    assert pool.asked == ["drain n2", "undrain n2"]
    assert "n1" not in capsys.readouterr().out


def test_a_rolling_drain_waits_for_agents_that_return_under_another_name() -> None:
    pool = FakePool(**{"h-1": "", "h-2": ""})
    pool.then(nothing, nothing, nothing, pool.forgotten("h-1"), nothing, pool.comes("h-3"))
    pool.then(nothing, nothing, pool.forgotten("h-2"), pool.comes("h-4"))
    roll(pool)
    assert pool.asked == ["drain h-1", "drain h-2"]


def test_a_rolling_drain_survives_a_server_outage_and_skips_lost_nodes() -> None:
    pool = FakePool(n1="", n2="")
    pool.then(nothing, pool.forgotten("n1"), nothing, pool.away, nothing, pool.away, pool.anew("n2"))
    pool.then(nothing)
    roll(pool)
    assert pool.asked == ["drain n2", "undrain n2"]
