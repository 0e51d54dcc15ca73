"""`holdfast explain`: why something happened, and why a job stands."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from holdfast.cli.connection import Server
from holdfast.cli.following.events import read_job_events
from holdfast.cli.following.kept_journals import journal_folder, newest_journal
from holdfast.cli.following.progress import describe, describe_request, time_of_day
from holdfast.cli.following.show import event_json
from holdfast.cli.options import with_option_groups
from holdfast.cli.output import AsJson, on_one_line, print_json, print_line, warn
from holdfast.errors import BadInputError, UnreachableError
from holdfast.observability.history.explanation import Explanation, explain
from holdfast.observability.history.job_condition import JobCondition, find_condition
from holdfast.protocol.events import FailureDetected, StacksTaken
from holdfast.protocol.position import Awaited

#: the source of a failure, in words
_DETECTORS = {
    "node_health": "the coordinator: an agent's connection or lease",
    "process": "an agent: its workers' processes",
    "exception": "a worker: the script or a collective raised an exception",
    "statistics": "the coordinator: what usually takes a moment took far longer, while others waited",
    "timeout": "a worker or the coordinator: a collective or a report did not come in time",
}
#: most nodes that are listed as unfit for a job
_MOST_NODES = 16
#: the meaning of a severity, in words
_SEVERITIES = {
    1: "the node is taken out of the job",
    2: "a process of the node ends, and is started again there",
    3: "no process is replaced: the same workers try again",
}


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("explain")(with_option_groups(explain_command))


def explain_command(
    what: Annotated[
        str | None,
        typer.Argument(metavar="[SEQ]", help="An event's number (`seq` in `holdfast events --json`)."),
    ] = None,
    file: Annotated[
        str | None,
        typer.Argument(metavar="[EVENTS]", help="A file that --events wrote.", show_default="the job that runs"),
    ] = None,
    as_json: AsJson = False,
    *,
    server: Server,
) -> None:
    """Explain an event, or why the job waits.

    With SEQ it explains that event, else the state of the job. Without a file the events are those of the running job,
    or, if no job runs on this machine, those kept of the job that ended last.
    """
    seq, path = _parse_arguments(what, file)
    path = path or _find_kept_journal(server)
    pooled: dict[str, Any] = {}
    if seq is None and path is None and (pool := server.find_pool_of_job()) is not None:
        with pool as client:
            pooled = client.job(server.job or "")
        if pooled["state"] != "admitted":
            _explain_pooled(pooled, as_json=as_json)
            return
    if seq is not None:
        found = explain(list(read_job_events(path, server)), seq)
        if as_json:
            print_json(_as_document(found))
        for line in () if as_json else explanation_lines(found):
            print_line(on_one_line(line))
        return
    standing = find_condition(list(read_job_events(path, server))) if path is not None else _read_condition(server)
    if as_json:
        print_json(dataclasses.asdict(standing) | ({"refuses": pooled["refuses"]} if pooled else {}))
        return
    for line in condition_lines(standing, path):
        print_line(on_one_line(line))
    _print_reserve(pooled)
    _print_unfit_nodes(pooled)


def _explain_pooled(job: dict[str, Any], *, as_json: bool) -> None:
    """Print why a job of a pool has no nodes, how it could start, the pool's reserve, and unfit nodes.

    With `as_json`, print the pool's answer `job` only.
    """
    if as_json:
        print_json(job)
        return
    print_line(f"job {job['job']} is {job['state']}{': ' if job['why'] else ''}{job['why']}")
    for would in job["would"]:
        print_line(f"it would begin with: {would}")
    _print_reserve(job)
    _print_unfit_nodes(job)


def _print_reserve(job: Mapping[str, Any]) -> None:
    """Print how many nodes the pool keeps in reserve and why, if it chooses that number itself; else nothing."""
    reserve = dict(job.get("reserve") or {})
    if reserve.get("why"):
        print_line(on_one_line(f"reserve of the pool: {reserve['nodes']}, {reserve['why']}"))


def _print_unfit_nodes(job: Mapping[str, Any]) -> None:
    """Print which nodes cannot run a job of a pool, why, and when the pool tries them again; nothing without such
    nodes.

    At most `_MOST_NODES` are named. `job` is the pool's answer about the job.
    """
    refuses = dict(job.get("refuses") or {})
    for node in list(refuses)[:_MOST_NODES]:
        print_line(on_one_line(f"{node} cannot be used: {refuses[node]}"))
    if len(refuses) > _MOST_NODES:
        print_line(f"and so are {len(refuses) - _MOST_NODES} more nodes")
    if refuses:
        print_line(
            f"a node needs {job['script']}, the same as on the job's other nodes, and room for "
            f"{job['workers_per_node']} of its workers: it is tried again once its agent is started again, or that "
            "script has changed there"
        )


def _parse_arguments(what: str | None, file: str | None) -> tuple[int | None, Path | None]:
    """Return the event's number and the file, or None for an argument that was left out.

    A single argument may be either.

    Raises:
        BadInputError: two arguments were given, and the first one is not a number.
    """
    if what is None or re.fullmatch("[0-9]{1,18}", what):
        return None if what is None else int(what), None if file is None else Path(file)
    if file is not None:
        raise BadInputError(f"SEQ is {what!r}: give an event's number, such as 42, then the file")
    return None, Path(what)


def _find_kept_journal(server: Server) -> Path | None:
    """Return the kept journal of the job that ended last on this machine, and say so on stderr.

    With -j, it is the last run of that job. None if an address is given, a matching job runs, or no journal was kept.
    """
    if server.address is not None:
        return None
    try:
        server.entry()
    except UnreachableError:
        path = newest_journal(journal_folder(os.environ), server.job)
        if path is not None:
            warn(f"holdfast: no such job runs on this machine; this is of {path}")
        return path
    except BadInputError:
        pass  # The next request reports the error.
    return None


def _read_condition(server: Server) -> JobCondition:
    """Ask the coordinator for the status and all events of the job, and return its condition."""
    with server.client() as client:
        status = client.status()
        events = list(client.events())
    awaited = msgspec.convert(status.get("awaited", []), tuple[Awaited, ...])
    return find_condition(events, now=float(status["clock"]), state=str(status["state"]), awaited=awaited)


def _as_document(found: Explanation) -> dict[str, Any]:
    """Return an explanation as plain data, with events as JSON."""
    facts = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    return {
        **facts,
        "event": msgspec.json.decode(event_json(found.event)),
        "failures": [msgspec.json.decode(event_json(failure)) for failure in found.failures],
        "rungs": [dataclasses.asdict(rung) for rung in found.rungs],
        "stood": msgspec.json.decode(event_json(found.stood)) if found.stood is not None else None,
        "rejected": [dataclasses.asdict(rejected) for rejected in found.rejected],
    }


def explanation_lines(found: Explanation) -> Iterator[str]:
    """Yield the lines that explain an event of a job.

    They give the event and its reason, the failures, each attempt to recover and its end, and the time that was spent.
    """
    event = found.event
    yield f"event {event.seq}, generation {event.generation}, term {event.term}: {describe(event)}"
    if found.why:
        yield f"why: {found.why}"
    for failure in found.failures:
        yield from _failure_lines(failure)
    if found.stood is not None:
        yield from _stack_lines(found.stood)
    for rung in found.rungs:
        end = "" if rung.held and not found.over else "; it held" if rung.held else f"; it failed: {rung.why_not}"
        yield f"tried: {rung.what} (generation {rung.generation}){end}"
        if rung.decision:
            yield f"  {rung.decision}"
    if found.action:
        yield from _recovery_lines(found)
    elif found.rungs and not found.over:
        yield "it is not over yet"
    if found.micro_batches_kept is not None or found.micro_batches_redone is not None:
        kept, redone = (_count(number) for number in (found.micro_batches_kept, found.micro_batches_redone))
        yield f"micro-batches of the step under way: {kept} kept, {redone} computed again"
    if found.phases:
        yield "phases: " + ", ".join(f"{name} {seconds:.3f} s" for name, seconds in found.phases.items())
    if found.seconds:
        spent = ", ".join(f"{cause.replace('_', '-')} {seconds:.3f} s" for cause, seconds in found.seconds.items())
        yield f"the time since the commit before: {spent}"
    for rejected in found.rejected:
        yield f"not done: {rejected.what}: {rejected.why}"


def _recovery_lines(found: Explanation) -> Iterator[str]:
    """Yield how the job recovered, from which state, how many bytes moved, and why it was chosen."""
    source = f"state from: {found.state_source}" if found.state_source else "state"
    yield f"recovered by: {found.action}; {source}, {found.moved_bytes / 1e6:.1f} MB moved"
    if found.chosen:
        yield f"  {found.chosen}"


def _failure_lines(failure: FailureDetected) -> Iterator[str]:
    """Yield the lines about a failure: node and class, detector and delay, severity, position, and detail."""
    yield f"failed: {failure.node}: {failure.category or 'class not known'} ({failure.kind}), event {failure.seq}"
    detector = f"{failure.detector} ({_DETECTORS.get(failure.detector, 'not known')})"
    yield f"  seen after {failure.after_s:.3f} s by {detector}"
    yield f"  severity {failure.severity}: {_SEVERITIES.get(failure.severity, 'not known')}"
    stood = {"step": failure.step, "phase": failure.phase, "micro-batch": failure.micro_batch}
    known = ", ".join(f"{name} {value}" for name, value in stood.items() if value is not None)
    if known:
        yield f"  it stood at {known}"
    if failure.detail:
        yield f"  {failure.detail}"


def _stack_lines(stood: StacksTaken) -> Iterator[str]:
    """Yield for each worker of a hang its phase, or the collective in which it waits; then the stacks."""
    for one in stood.workers:
        of = "" if one.micro_batch is None else f", micro-batch {one.micro_batch}"
        at = f"  {one.worker} is at '{one.phase}' of step {one.step}{of}"
        last = one.collectives[-1] if one.waits and one.collectives else None
        if last is None:
            yield f"{at} for {one.for_s:.3f} s"
        else:
            yield f"{at}: waits in {last.what} of {last.size} ranks, {last.bytes} bytes, for {last.began_s:.3f} s"
    for stack in stood.stacks:
        yield f"  {', '.join(stack.workers)}:"
        yield from (f"    {line}" for line in stack.lines)
    if stood.missing:
        yield f"  and {stood.missing} more workers"


def _count(number: int | None) -> str:
    return "not known how many" if number is None else str(number)


def condition_lines(standing: JobCondition, file: Path | None = None) -> Iterator[str]:
    """Yield the state of a job line by line: reason, newest step, awaited nodes, and the command that helps.

    Args:
        file: the file from which the events were read, or None.
    """
    yield f"{standing.job} is {standing.state} since {time_of_day(standing.since)}, at step {standing.step}"
    if standing.why:
        yield f"why: {standing.why}"
    usual = "" if standing.usual_step_s is None else f"; a step usually takes {standing.usual_step_s:.3f} s"
    if standing.step and standing.state not in ("finished", "stopped", "failed"):
        yield f"the newest step was committed {standing.stands_s:.1f} s ago{usual}"
    for awaited in standing.awaited:
        since = "" if awaited.since_s is None else f", for {awaited.since_s:.1f} s"
        at = f"; it is at {awaited.at}" if awaited.at else ""
        by = f"; {', '.join(awaited.for_whom)} wait for it" if awaited.for_whom else ""
        yield f"awaited: {awaited.who}: {awaited.what}{since}{at}{by}"
        yield from (f"  {frame}" for frame in awaited.stack)
    if standing.command and standing.seq:
        yield describe_request(standing.who, standing.about, standing.command)
    if standing.seq:
        yield f"more: holdfast explain {standing.seq}{f' {file}' if file is not None else ''}"
