"""Commands that act on a job that runs: `scale`, `move`, `drain`, `undrain`, `inject`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import msgspec
import typer

from holdfast.cli.connection import Server
from holdfast.cli.following.stop import NoWait
from holdfast.cli.job.waiting import await_back, await_left, await_moved
from holdfast.cli.options import with_option_groups
from holdfast.cli.output import AsJson, print_json, print_line
from holdfast.cli.pool.draining import drain_of_pool
from holdfast.cli.pool.nodes import move_together, scale_job, undrain_nodes
from holdfast.control.client import CoordinatorClient
from holdfast.control.pool_client import PoolClient
from holdfast.coordination.job.injection import FAULTS
from holdfast.errors import EXIT_FAILED, EXIT_REFUSED, BadInputError, RefusedError, UnreachableError
from holdfast.protocol.events import NodeMoved, NodeStayed

DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would move, and do nothing.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("scale")(with_option_groups(scale))
    app.command("move")(with_option_groups(move))
    app.command("drain")(with_option_groups(drain))
    app.command("undrain")(with_option_groups(undrain))
    app.command("inject")(with_option_groups(inject))


def scale(
    size: Annotated[str, typer.Argument(metavar="N|+N", help="N: this many nodes. +N: N more.")],
    as_json: AsJson = False,
    *,
    server: Server,
) -> None:
    """Start further nodes, or change a pool job's limit.

    Without a pool, it starts N more nodes, or as many as the job lacks of N. A job that has more than N is refused:
    drain nodes instead. In a pool, it changes the most nodes that the job gets.
    """
    if not re.fullmatch(r"\+?[0-9]{1,9}", size) or int(size) < 1:
        raise BadInputError(f"the size is {size!r}: give a number of nodes, 4, or how many more, +1")
    pool = server.find_pool_of_job()
    if pool is not None:
        assert server.job is not None
        scale_job(pool, server.job, size, as_json=as_json)
        return
    with server.client() as client:
        count = int(size) if size.startswith("+") else _count_missing_nodes(client, int(size))
        if count:
            client.add_nodes(count)
    if as_json:
        print_json({"nodes_started": count})
    else:
        print_line(f"{count} more {'node is' if count == 1 else 'nodes are'} on the way")


def _count_missing_nodes(client: CoordinatorClient, size: int) -> int:
    """Return how many nodes a job lacks of a size. Standbys do not count.

    Raises:
        RefusedError: the job has more nodes than that.
    """
    here = sum(not node["standby"] for node in client.status()["nodes"])
    if size < here:
        raise RefusedError(
            f"the job has {here} nodes, {size} is fewer: choose the nodes to remove with `holdfast drain NODE`"
        )
    return size - here


def move(
    nodes: Annotated[
        list[str] | None,
        typer.Argument(metavar="NODE...", help="Names, as `holdfast status` shows them.", show_default=False),
    ] = None,
    to: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NODE",
            help="Standby for the node; repeatable, in order.",
            show_default="any that is warm",
        ),
    ] = None,
    compact: Annotated[
        bool, typer.Option("--compact", help="In a pool: use fewer racks and zones if it pays.")
    ] = False,
    dry_run: DryRun = False,
    no_wait: NoWait = False,
    as_json: AsJson = False,
    *,
    server: Server,
) -> None:
    """Replace nodes by standbys while training goes on.

    Without --no-wait it waits until each node has been replaced or stays, and prints the result. A replaced node
    becomes a standby.

    Exit codes: 4 if a node could not be replaced, 1 if the outcome for a node is not known, for example because it was
    lost.
    """
    if compact:
        if nodes or to or server.job:
            raise BadInputError("--compact moves all jobs of a pool as is best: leave out nodes, --to and -j")
        move_together(server.pool(), dry_run=dry_run, no_wait=no_wait, as_json=as_json)
        return
    if not nodes:
        raise BadInputError("no node is named: name the nodes to replace, or give --compact")
    if dry_run:
        _print_forecast(server, nodes, to or (), stays=True, as_json=as_json)
        return
    with server.client() as client:
        after = client.status()["events"]
        client.move(nodes, to or ())
        moved = {} if no_wait else await_moved(client, nodes, after, print_status=None if as_json else print_line)
    if as_json:
        stayed = {event.node: event.detail for event in moved.values() if isinstance(event, NodeStayed)}
        told = [_move_as_json(event) for event in moved.values() if isinstance(event, NodeMoved)]
        print_json({"nodes": nodes, "moved": told, "stayed": stayed})
    for node in () if as_json else nodes:
        later = "is replaced at the end of a step, once a standby is warm"
        print_line(f"{node} {later}" if no_wait else _describe_outcome(moved, node))
    if any(isinstance(event, NodeStayed) for event in moved.values()):
        raise typer.Exit(EXIT_REFUSED)
    if None in moved.values():
        raise typer.Exit(EXIT_FAILED)


def _describe_outcome(moved: Mapping[str, NodeMoved | NodeStayed | None], node: str) -> str:
    """Return in words whether a node was replaced by another."""
    event = moved[node]
    if event is None:
        return f"{node} was not replaced: see `holdfast events`"
    if isinstance(event, NodeStayed):
        return f"{node} keeps its place: {event.detail}"
    took = f"{event.down_s:.3f} s from a step's end to the next one's, {event.moved_bytes / 1e6:.1f} MB moved"
    return f"{event.to_node} has taken {node}'s place: {took}"


def _print_forecast(server: Server, nodes: Sequence[str], to: Sequence[str], *, stays: bool, as_json: bool) -> None:
    """Print the coordinator's forecast of a move (`stays`) or a drain: bytes, down time and reason. Nothing is moved.

    Args:
        nodes: the nodes to move or drain.
        to: the standbys to move to; empty for any. Ignored for a drain.
    """
    with server.client() as client:
        forecast = client.forecast(nodes, to, stays=stays)
    if as_json:
        print_json({"forecast": msgspec.to_builtins(forecast)})
        return
    for one in forecast:
        rank = f" (rank {', '.join(map(str, one.ranks))})" if one.ranks else ""
        if one.moved_bytes is None:
            what = "a node's state (size unknown until one has moved)"
        else:
            what = f"{one.moved_bytes / 1e6:.1f} MB"
        experts = f", {one.expert_replicas} replicas of experts" if one.expert_replicas else ""
        whose = f"{one.to} takes the place of {one.node}{rank}" if one.to else f"{one.node}{rank} leaves"
        when = "once a standby is warm" if one.wait_s is None else f"in {one.wait_s:.1f} s at the latest"
        print_line(f"{whose} {when}: {what}{experts}; {one.down_s:.3f} s from a step's end to the next one's")
        print_line(f"  why: {one.why}")


def _move_as_json(event: NodeMoved) -> dict[str, str | float]:
    return {
        "from_node": event.from_node,
        "to_node": event.to_node,
        "down_s": event.down_s,
        "moved_bytes": event.moved_bytes,
    }


def drain(
    nodes: Annotated[
        list[str] | None,
        typer.Argument(metavar="NODE...", help="Names, as `holdfast status` shows them.", show_default=False),
    ] = None,
    rolling: Annotated[bool, typer.Option("--rolling", help="Drain all nodes, one after the other.")] = False,
    dry_run: DryRun = False,
    no_wait: NoWait = False,
    as_json: AsJson = False,
    *,
    server: Server,
) -> None:
    """Remove nodes at the end of a step. Nothing is lost.

    In a pool, the jobs first replace a drained node, and then it gets no job. --rolling drains all nodes in turn, or
    with -j all nodes of one job. Each stays drained until its agent is restarted or `holdfast undrain` names it.
    """
    if rolling == bool(nodes):
        raise BadInputError("name the nodes to remove, or give --rolling, and not both")
    if rolling and no_wait:
        raise BadInputError("--rolling waits for each node: leave out --no-wait")
    if rolling and dry_run:
        raise BadInputError("--dry-run is for nodes that are named: leave out --rolling")
    pool = server.find_pool_of_nodes()
    if pool is not None:
        how = "roll" if rolling else "foresee" if dry_run else "drain"
        drain_of_pool(pool, how, nodes or (), job=server.job or "", no_wait=no_wait, as_json=as_json)
        return
    if dry_run:
        _print_forecast(server, nodes or (), (), stays=False, as_json=as_json)
        return
    with server.client() as client:
        if rolling:
            left, lost = _drain_all_in_turn(client, print_status=(lambda _: None) if as_json else print_line)
        else:
            lost: list[str] = []
            left = list(nodes or ())
            client.drain(left)
            if not no_wait:
                await_left(client, left)
    if as_json:
        print_json({"nodes": left, "left": not no_wait, **({"lost": lost} if rolling else {})})
    elif not rolling:
        what = "leaves at the end of a step" if no_wait else "has left"
        for node in left:
            print_line(f"{node} {what}; `holdfast undrain {node}` lets it come back")


def _drain_all_in_turn(client: CoordinatorClient, print_status: Callable[[str], None]) -> tuple[list[str], list[str]]:
    """Drain each node and let it return, one after the other. Return the drained nodes, and the skipped ones.

    A node that is gone, or lost on its return, is skipped. Each result is passed to `print_status`.
    """
    names = [str(node["node"]) for node in client.status()["nodes"]]
    left: list[str] = []
    for done, name in enumerate(names, start=1):
        place = f"({done} of {len(names)})"
        if not _drain_and_wait(client, name):
            print_status(f"{name} is gone, and is skipped: see `holdfast events` {place}")
            continue
        left.append(name)
        after = client.status()["events"]
        started = client.undrain(name)
        print_status(f"{name} has left: {'it is started again' if started else 'start `holdfast agent` there again'}")
        if await_back(client, name, after):
            print_status(f"{name} is back {place}")
        else:
            left.pop()
            print_status(f"{name} is lost again, and is skipped: see `holdfast events` {place}")
    return left, [name for name in names if name not in left]


def _drain_and_wait(client: CoordinatorClient, name: str) -> bool:
    """Drain a node and wait until it has left. Return False if the node was already gone."""
    try:
        client.drain([name])
    except UnreachableError:
        if name in {node["node"] for node in client.status()["nodes"]}:
            raise
        return False
    await_left(client, [name])
    return True


def undrain(
    nodes: Annotated[list[str], typer.Argument(metavar="NODE...", help="Names, as `holdfast status` shows them.")],
    as_json: AsJson = False,
    *,
    server: Server,
) -> None:
    """Allow drained or quarantined nodes to return.

    In a pool, jobs may get a drained node again. In a job, it prints whether the node's agent is started again, or the
    user must start it.
    """
    pool = server.find_pool_of_nodes()
    if pool is not None:
        with pool:
            if not server.job or _are_drained(pool, nodes):
                undrain_nodes(pool, nodes, as_json=as_json)
                return
    with server.client() as client:
        started = {node: client.undrain(node) for node in nodes}
    if as_json:
        print_json({"nodes": started})
        return
    for node, is_started in started.items():
        print_line(
            f"{node} may come back: {'it is being started' if is_started else 'start `holdfast agent` there again'}"
        )


def _are_drained(pool: PoolClient, names: Sequence[str]) -> bool:
    """Return whether all these nodes are drained nodes of a pool. Else a job has quarantined one."""
    drained = {node["node"] for node in pool.status()["nodes"] if node["drained"]}
    return drained >= set(names)


def inject(
    fault: Annotated[
        str,
        typer.Argument(
            metavar="FAULT",
            help="\n".join(f"{name}: {what}" for name, what in FAULTS.items()),
            show_default=False,
        ),
    ],
    node: Annotated[str, typer.Argument(metavar="NODE", help="The node's name, as `holdfast status` shows it.")],
    worker: Annotated[
        int | None,
        typer.Option(help="Only this worker of the node.", show_default="the whole node; of a worker's faults, 0"),
    ] = None,
    step: Annotated[int | None, typer.Option(help="When this step is reached.", show_default="now")] = None,
    phase: Annotated[str, typer.Option(help="Phase of the step, such as compute or voted.")] = "",
    times: Annotated[float, typer.Option(help="For slow, slow-link: the factor.")] = 3.0,
    by_s: Annotated[float, typer.Option("--by", metavar="SECONDS", help="For clock-jump: how far.")] = 3600.0,
    as_json: AsJson = False,
    *,
    server: Server,
) -> None:
    """Make a node fail, to see the job recover. Refused unless the job was started with --allow-faults.

    With --worker, the first four faults strike one worker of the node. The other faults always strike a worker, by
    default the first. Only `--verify-state` finds `corrupt-state`.
    """
    with server.client() as client:
        client.inject(fault, node, worker=worker, step=step, phase=phase, times=times, by_s=by_s)
    if as_json:
        print_json({"fault": fault, "node": node, "worker": worker, "step": step, "phase": phase or None})
        return
    when = f" at step {step}" if step is not None else ""
    print_line(f"{node}: {fault}{when}{f' in {phase}' if phase else ''}")
