"""What `drain` does with a pool's nodes: by name, one after the other, or only in words."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from holdfast.cli.output import on_one_line, print_json, say
from holdfast.cli.patience import LOOK_AGAIN_S, patiently
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
    """Have jobs leave nodes of a pool: those that are named, or (roll) all of the pool, or of a job, in turn."""
    if how == "roll":
        _roll_nodes(pool, job, as_json=as_json)
    elif how == "foresee":
        _foresee_drain(pool, names, as_json=as_json)
    else:
        _drain_nodes(pool, names, no_wait=no_wait, as_json=as_json)


def _drain_nodes(pool: PoolClient, names: Sequence[str], *, no_wait: bool, as_json: bool) -> None:
    """Have jobs leave nodes of a pool, and nobody be given them."""
    with pool as client:
        client.drain(names)
        if not no_wait:
            _await_nobodys(client, names, (lambda _: None) if as_json else say)
    if as_json:
        print_json({"nodes": list(names), "left": not no_wait})
        return
    for name in names:
        what = "is left by its job as soon as that can be" if no_wait else "is nobody's"
        say(f"{name} {what}, and given to none; `holdfast undrain {name}` lets it be again")


def _foresee_drain(pool: PoolClient, names: Sequence[str], *, as_json: bool) -> None:
    """Say what would come of draining nodes of a pool."""
    with pool as client:
        forecast = client.foresee_drain(names)
    if as_json:
        print_json({"forecast": msgspec.to_builtins(forecast)})
        return
    for one in forecast:
        whose = f" (job {one.job})" if one.job else ""
        say(on_one_line(f"{one.node}{whose}: {one.why}"))


def _roll_nodes(pool: PoolClient, job: str, *, as_json: bool) -> None:
    """Drain every node of a pool, or of one of its jobs, one after the other.

    The next one follows once the one before is back: its agent has been started again, or somebody has undrained it.
    """
    told: Callable[[str], None] = (lambda _: None) if as_json else say
    with pool as client:
        there = [node for node in client.status()["nodes"] if not job or node["job"] == job]
        names = [node["node"] for node in there if node["here"] and not node["drained"]]
        for left_out in [node for node in there if node["node"] not in names]:
            told(f"{left_out['node']} is left out: it is {'drained already' if left_out['drained'] else 'away'}")
        for done, name in enumerate(names, 1):
            _roll(client, name, told)
            told(f"{name} is back ({done} of {len(names)})")
    if as_json:
        print_json({"nodes": names, "left": True})


def _roll(client: PoolClient, name: str, told: Callable[[str], None]) -> None:
    """Have one node left, and return once it is back: under its name, or another's in its place."""
    before = {node["node"]: node["session"] for node in patiently(client.status)["nodes"]}
    try:
        client.drain([name])
    except UnreachableError:
        if name in (node["node"] for node in patiently(client.status)["nodes"]):
            raise
        told(f"{name} has left the pool by itself")
        return
    try:
        _await_nobodys(client, [name], told)
    except RefusedError:
        return  # (somebody wants it back already)
    told(f"{name} is nobody's: the next one follows once its agent is started again, or at `holdfast undrain {name}`")
    while True:
        found = {node["node"]: node for node in patiently(client.status)["nodes"]}
        mine = found.get(name)
        if mine is None and not found.keys() <= before.keys():
            return  # (an agent without --node-name is another node each time)
        if mine is not None and mine["here"]:
            if not mine["drained"]:
                return
            if mine["session"] != before.get(name):
                client.undrain([name])
        time.sleep(LOOK_AGAIN_S)


def _await_nobodys(client: PoolClient, names: Sequence[str], told: Callable[[str], None]) -> None:
    """Return once no job has any of these nodes; say whom each waits for.

    Raises:
        RefusedError: one is not drained any more: somebody has let it be given to jobs again.
        UnreachableError: nobody has answered for half a minute.
    """
    said: set[str] = set()
    while True:
        found = {node["node"]: node for node in patiently(client.status)["nodes"] if node["node"] in names}
        if again := [name for name, node in found.items() if not node["drained"]]:
            raise RefusedError(f"node {again[0]} is drained no more: somebody has asked for that")
        for line in _waits(found):
            if line not in said:
                told(line)
            said.add(line)
        if not any(node["job"] for node in found.values()):
            return
        time.sleep(LOOK_AGAIN_S)


def _waits(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name, node in found.items():
        if node["job"] and not node["leaving"]:
            yield f"{name} waits: job {node['job']} keeps it until it can do without, or another trains in its place"
