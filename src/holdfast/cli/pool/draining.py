"""`holdfast drain` for nodes of a pool: by name, all in turn, or as a forecast."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from holdfast.cli.output import on_one_line, print_json, print_line
from holdfast.cli.retrying import POLL_S, retry_query
from holdfast.control.pool_client import PoolClient
from holdfast.errors import RefusedError, UnreachableError


def drain_of_pool(
    pool: PoolClient,
    how: Literal["drain", "foresee", "roll"],
    names: Sequence[str],
    *,
    job: str,
    no_wait: bool,
    as_json: bool,
) -> None:
    """Drain the named nodes of a pool, or all nodes of the pool or of a job in turn (`roll`), or print a forecast."""
    if how == "roll":
        _roll_nodes(pool, job, as_json=as_json)
    elif how == "foresee":
        _foresee_drain(pool, names, as_json=as_json)
    else:
        _drain_nodes(pool, names, no_wait=no_wait, as_json=as_json)


def _drain_nodes(pool: PoolClient, names: Sequence[str], *, no_wait: bool, as_json: bool) -> None:
    """Drain nodes of a pool, wait until no job has them unless `no_wait`, and print how to undo it."""
    with pool as client:
        client.drain(names)
        if not no_wait:
            _await_without_job(client, names, (lambda _: None) if as_json else print_line)
    if as_json:
        print_json({"nodes": list(names), "left": not no_wait})
        return
    for name in names:
        what = "will be left by its job" if no_wait else "is drained"
        print_line(f"{name} {what}, and no job gets it; undo: `holdfast undrain {name}`")


def _foresee_drain(pool: PoolClient, names: Sequence[str], *, as_json: bool) -> None:
    """Print what the pool would do about each node if it was drained, and why. Nothing is drained."""
    with pool as client:
        forecast = client.foresee_drain(names)
    if as_json:
        print_json({"forecast": msgspec.to_builtins(forecast)})
        return
    for one in forecast:
        whose = f" (job {one.job})" if one.job else ""
        print_line(on_one_line(f"{one.node}{whose}: {one.why}"))


def _roll_nodes(pool: PoolClient, job: str, *, as_json: bool) -> None:
    """Drain every node of a pool, or of one of its jobs, one after the other.

    Nodes that are away or drained are left out.

    The next node follows once the one before is back: its agent was restarted, or a user has undrained it.
    """
    report: Callable[[str], None] = (lambda _: None) if as_json else print_line
    with pool as client:
        there = [node for node in client.status()["nodes"] if not job or node["job"] == job]
        names = [node["node"] for node in there if node["here"] and not node["drained"]]
        for left_out in [node for node in there if node["node"] not in names]:
            report(f"{left_out['node']} is left out: it is {'drained already' if left_out['drained'] else 'away'}")
        for done, name in enumerate(names, 1):
            _drain_and_await_return(client, name, report)
            report(f"{name} is back ({done} of {len(names)})")
    if as_json:
        print_json({"nodes": names, "left": True})


def _drain_and_await_return(client: PoolClient, name: str, report: Callable[[str], None]) -> None:
    """Drain one node, and wait until it is back, under its own name or another. Undrain it if its agent was restarted.

    Return at once if it has left the pool, or a user undrains it meanwhile.
    """
    before = {node["node"]: node["session"] for node in retry_query(client.status)["nodes"]}
    try:
        client.drain([name])
    except UnreachableError:
        if name in (node["node"] for node in retry_query(client.status)["nodes"]):
            raise
        report(f"{name} has left the pool")
        return
    try:
        _await_without_job(client, [name], report)
    except RefusedError:
        return  # It was undrained meanwhile.
    report(f"{name} is drained: the next one follows once its agent is restarted, or at `holdfast undrain {name}`")
    while True:
        found = {node["node"]: node for node in retry_query(client.status)["nodes"]}
        mine = found.get(name)
        if mine is None and not found.keys() <= before.keys():
            return  # An agent without --node-name has another name each time.
        if mine is not None and mine["here"]:
            if not mine["drained"]:
                return
            if mine["session"] != before.get(name):
                client.undrain([name])
        time.sleep(POLL_S)


def _await_without_job(client: PoolClient, names: Sequence[str], report: Callable[[str], None]) -> None:
    """Wait until no job has any of these nodes. Report once each node that a job keeps and has not begun to leave.

    Raises:
        RefusedError: a node was undrained meanwhile.
        UnreachableError: the pool has not answered for half a minute.
    """
    said: set[str] = set()
    while True:
        found = {node["node"]: node for node in retry_query(client.status)["nodes"] if node["node"] in names}
        if again := [name for name, node in found.items() if not node["drained"]]:
            raise RefusedError(f"node {again[0]} was undrained meanwhile")
        for line in _waiting_lines(found):
            if line not in said:
                report(line)
            said.add(line)
        if not any(node["job"] for node in found.values()):
            return
        time.sleep(POLL_S)


def _waiting_lines(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each node that a job still uses without having started to leave it."""
    for name, node in found.items():
        if node["job"] and not node["leaving"]:
            yield f"{name} waits: job {node['job']} keeps it until it can do without, or another trains in its place"
