"""A client of the HTTP API of a pool, for commands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from holdfast.control.client import ServerClient
from holdfast.protocol.job_spec import JobSpec
from holdfast.protocol.messages.forecast import DrainForecast

_POLL_S = 20.0


class _Submission(msgspec.Struct):
    submission: int


class _Forecasts(msgspec.Struct):
    forecast: list[DrainForecast]


def _quote(name: str) -> str:
    """Return a name, quoted for use in a path."""
    return quote(name, safe="")


class PoolClient(ServerClient):
    """A client of a pool."""

    what = "pool"

    def status(self) -> dict[str, Any]:
        """Return the pool's nodes and jobs, from JSON. Raises UnreachableError if another kind of server answers."""
        answer = self._decode(self._request("GET", "/pool").content, dict[str, Any])
        if not isinstance(answer.get("pool"), str):
            raise self._not_holdfast_error()
        return answer

    def job(self, name: str) -> dict[str, Any]:
        """Return a job, and the conditions under which it would start."""
        return self._decode(self._request("GET", f"/jobs/{_quote(name)}").content, dict[str, Any])

    def submit(self, spec: JobSpec) -> int:
        """Submit a job, and return its number."""
        return self._decode(self._request("POST", "/jobs", spec).content, _Submission).submission

    def stop(self, name: str, *, now: bool = False, why: str = "") -> None:
        """End a job, queued or not.

        Args:
            name: of the job.
            now: whether to end it without a save.
            why: the reason, shown to its users.
        """
        self._request("POST", f"/jobs/{_quote(name)}/stop", {"now": now, "why": why})

    def suspend(self, name: str, *, force: bool = False) -> None:
        """Suspend a job: it is saved, and leaves its nodes.

        Args:
            name: of the job.
            force: whether to suspend a job that keeps no checkpoints, too.
        """
        self._request("POST", f"/jobs/{_quote(name)}/suspend", {"force": force})

    def resume(self, name: str) -> None:
        """Resume a suspended job."""
        self._request("POST", f"/jobs/{_quote(name)}/resume")

    def update(self, name: str, changes: Mapping[str, int | float | Sequence[int]]) -> None:
        """Change the requirements of a job."""
        self._request("POST", f"/jobs/{_quote(name)}/update", {"changes": dict(changes)})

    def compact(self, *, dry_run: bool) -> dict[str, Any]:
        """Move jobs closer together if that is worth its cost, and return the moves.

        With `dry_run`, only return the moves that would be made.
        """
        return self._decode(self._request("POST", "/compact", {"dry_run": dry_run}).content, dict[str, Any])

    def what_if(self, **change: object) -> dict[str, Any]:
        """Return the plan that would follow a change: `lose` a node, `add` nodes, or `submit` a job."""
        return self._decode(self._request("POST", "/whatif", change).content, dict[str, Any])

    def drain(self, nodes: Sequence[str]) -> None:
        """Drain nodes, and do not grant them to jobs until `undrain`."""
        self._request("POST", "/nodes/drain", {"nodes": list(nodes)})

    def foresee_drain(self, nodes: Sequence[str]) -> list[DrainForecast]:
        """Return the forecast for draining these nodes, without draining them."""
        answer = self._request("POST", "/nodes/drain", {"nodes": list(nodes), "dry_run": True})
        return self._decode(answer.content, _Forecasts).forecast

    def undrain(self, nodes: Sequence[str]) -> None:
        """Allow jobs to use drained nodes again."""
        self._request("POST", "/nodes/undrain", {"nodes": list(nodes)})

    def forget(self, node: str) -> None:
        """Remove a node that will not return."""
        self._request("POST", f"/nodes/{_quote(node)}/forget")

    def events(self, after: int = 0, *, follow: bool = False) -> Iterator[dict[str, Any]]:
        """Yield the pool's events above number `after`, from JSON, up to the newest event, or forever.

        Args:
            after: number of an event.
            follow: whether to wait for later events.

        Raises:
            UnreachableError: the pool does not answer, also while following.
        """
        while True:
            wait_s = _POLL_S if follow else 0.0
            answer = self._request("GET", f"/pool/events?after={after}&wait={wait_s}", wait_s=wait_s)
            lines = answer.content.splitlines()
            for line in lines:
                event = self._decode(line, dict[str, Any])
                after = int(event["seq"])
                yield event
            if not follow and not lines:
                return
