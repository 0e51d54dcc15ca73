"""The commands' side of a pool's HTTP interface."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from holdfast.control.client import ServerClient
from holdfast.protocol.job_spec import JobSpec
from holdfast.protocol.messages.forecast import DrainForecast

_POLL_S = 20.0


class _Submitted(msgspec.Struct):
    submission: int


class _Foreseen(msgspec.Struct):
    forecast: list[DrainForecast]


def _quoted(name: str) -> str:
    """Return a name as it stands in a path, whatever it is made of."""
    return quote(name, safe="")


class PoolClient(ServerClient):
    """Speaks with a pool."""

    what = "pool"

    def status(self) -> dict[str, Any]:
        """Return the pool's nodes and jobs."""
        answer = self._read(self._ask("GET", "/pool").content, dict[str, Any])
        if not isinstance(answer.get("pool"), str):
            raise self._stranger()
        return answer

    def job(self, name: str) -> dict[str, Any]:
        """Return a job, and what would let it begin."""
        return self._read(self._ask("GET", f"/jobs/{_quoted(name)}").content, dict[str, Any])

    def submit(self, spec: JobSpec) -> int:
        """Hand in a job; return its number."""
        return self._read(self._ask("POST", "/jobs", spec).content, _Submitted).submission

    def stop(self, name: str, *, now: bool = False, why: str = "") -> None:
        """End a job, queued or not; `now`: without its being saved. `why`: as its users are told."""
        self._ask("POST", f"/jobs/{_quoted(name)}/stop", {"now": now, "why": why})

    def suspend(self, name: str, *, force: bool = False) -> None:
        """Have a job saved, and leave its nodes."""
        self._ask("POST", f"/jobs/{_quoted(name)}/suspend", {"force": force})

    def resume(self, name: str) -> None:
        """Let a suspended job go on."""
        self._ask("POST", f"/jobs/{_quoted(name)}/resume")

    def update(self, name: str, changes: Mapping[str, int | float | Sequence[int]]) -> None:
        """Change what a job asks for."""
        self._ask("POST", f"/jobs/{_quoted(name)}/update", {"changes": dict(changes)})

    def compact(self, *, dry_run: bool) -> dict[str, Any]:
        """Move jobs together, where that is worth its cost; return what moves."""
        return self._read(self._ask("POST", "/compact", {"dry_run": dry_run}).content, dict[str, Any])

    def what_if(self, **change: object) -> dict[str, Any]:
        """Return the plan that would follow: `lose` a node, `add` so many, or `submit` a job."""
        return self._read(self._ask("POST", "/whatif", change).content, dict[str, Any])

    def drain(self, nodes: Sequence[str]) -> None:
        """Have jobs leave nodes in good order, and nobody be given them."""
        self._ask("POST", "/nodes/drain", {"nodes": list(nodes)})

    def foresee_drain(self, nodes: Sequence[str]) -> list[DrainForecast]:
        """Return what would come of draining these nodes; nothing is done."""
        answer = self._ask("POST", "/nodes/drain", {"nodes": list(nodes), "dry_run": True})
        return self._read(answer.content, _Foreseen).forecast

    def undrain(self, nodes: Sequence[str]) -> None:
        """Let nodes be given to jobs again."""
        self._ask("POST", "/nodes/undrain", {"nodes": list(nodes)})

    def forget(self, node: str) -> None:
        """Say that a node does not come back."""
        self._ask("POST", f"/nodes/{_quoted(node)}/forget")

    def events(self, after: int = 0, *, follow: bool = False) -> Iterator[dict[str, Any]]:
        """Yield the pool's events above number `after`: those there are, or (`follow`) for ever."""
        while True:
            wait_s = _POLL_S if follow else 0.0
            answer = self._ask("GET", f"/pool/events?after={after}&wait={wait_s}", wait_s=wait_s)
            lines = answer.content.splitlines()
            for line in lines:
                event = self._read(line, dict[str, Any])
                after = int(event["seq"])
                yield event
            if not follow and not lines:
                return
