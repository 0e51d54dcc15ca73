"""What commands wait for, told by what /status says: nodes that train, standbys that wait, a job that ends before."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.cli.job.act import _missing
from holdfast.cli.job.awaiting import await_back, await_left
from holdfast.control.client import CoordinatorClient
from holdfast.errors import RefusedError


class Answers(CoordinatorClient):
    """Says one status after the other, and none twice."""

    def __init__(self, *statuses: dict[str, Any]) -> None:
        self.left = list(statuses)

    def status(self) -> dict[str, Any]:
        return self.left.pop(0)


def node(name: str, rank: int | None = 0, generation: int = 2, standby: str = "") -> dict[str, Any]:
    return {"node": name, "standby": standby, "workers": [{"rank": rank, "generation": generation}]}


def status(*nodes: dict[str, Any], state: str = "running") -> dict[str, Any]:
    return {"nodes": list(nodes), "generation": 2, "state": state}


def test_a_node_is_back_once_its_workers_are_in_the_generation_in_force() -> None:
    starting = {"node": "a", "standby": "", "workers": []}
    client = Answers(
        status(), status(starting), status(node("a", None)), status(node("a", generation=1)), status(node("a"))
    )
    await_back(client, "a")
    assert not client.left


def test_a_standby_is_back_once_it_waits_again() -> None:
    """It never gets a rank: a rolling drain waited for ever."""
    client = Answers(status(), status(node("s", None, 0, standby="cold")))
    await_back(client, "s")
    assert not client.left


def test_nobody_waits_for_a_job_that_is_over() -> None:
    await_left(Answers(status(node("a"), node("b")), status(node("b"))), ["a"])
    with pytest.raises(RefusedError, match="the job is failed, before a had left"):
        await_left(Answers(status(node("a"), state="failed")), ["a"])


def test_standbys_are_none_of_a_jobs_size() -> None:
    assert _missing(Answers(status(node("a"), node("s", None, standby="warm"))), 2) == 1
