"""`holdfast calibrate`: how long a job's steps take with each number of nodes, measured on a pool."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from holdfast.cli.connection import Server
from holdfast.cli.options import with_option_groups
from holdfast.cli.output import AsJson, print_json, print_line, warn
from holdfast.cli.retrying import POLL_S, retry_query, retry_request
from holdfast.cli.spec_options import collect_job, job_spec
from holdfast.control.launch.script_modules import with_script
from holdfast.control.launch.settings import check_script
from holdfast.control.pool_client import PoolClient
from holdfast.errors import EXIT_FAILED, EXIT_INTERRUPTED, BadInputError, HoldfastError
from holdfast.protocol.job_spec import CheckpointSpec, JobSpec, OutputSpec, PaceSpec
from holdfast.protocol.pool.record import OVER

#: With the least weight and priority, the copy takes no nodes from other jobs under policies that use them.
_WEIGHT, _PRIORITY = 1e-3, -1000
_INTERRUPTED = "it was interrupted"


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("calibrate")(with_option_groups(calibrate))


def calibrate(
    file: Annotated[str, typer.Argument(help="The job's file.", metavar="JOB.toml")],
    nodes: Annotated[str, typer.Option("--nodes", metavar="MIN:MAX", help="Numbers of nodes to measure.")],
    patience: Annotated[
        float, typer.Option(metavar="SECONDS", help="Longest wait for a number of nodes.", min=1.0)
    ] = 600.0,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the measured times to this TOML file.")
    ] = None,
    as_json: AsJson = False,
    *,
    server: Server,
) -> None:
    """Measure step times with each number of nodes.

    A copy of the job runs in the pool, with each number in turn, and then ends. The times are printed in the form of a
    job's file.

    If some could not be measured, the others are still printed and written, and the exit code is 1, or 130 after
    Ctrl-C.
    """
    least, most = _parse_sizes(nodes)
    if output is not None and (output.is_dir() or not os.access(output.parent, os.W_OK)):
        raise BadInputError(f"--output is {output}: it cannot be written; give a file in a folder that can")
    given = with_script(job_spec(collect_job(file, (), (), {})), os.getcwd()).settled(os.getcwd())
    check_script(given.script)
    with server.pool() as client:
        found, why = _measure(
            client,
            _job_to_measure(given, least),
            (least, most),
            patience,
            print_status=_print_nothing if as_json else print_line,
        )
    document = _document(found, most)
    if as_json:
        print_json({"pace": document, "output": _counted(found, OutputSpec()), "why": why})
    elif document["step_s"]:
        print_line(_toml(document, _counted(found, given.output)))
    if document["step_s"] and output is not None:
        output.write_text(_toml(document, _counted(found, given.output)))
    warn_of_pace(msgspec.structs.replace(given, pace=PaceSpec(step_s=tuple(document["step_s"]))))
    if why:
        warn(f"the calibration is kept as far as it came: {why}")
        raise typer.Exit(EXIT_INTERRUPTED if why == _INTERRUPTED else EXIT_FAILED)


def warn_of_pace(spec: JobSpec) -> None:
    """Warn of node counts with which a job is slower than with fewer: the policy waf does not give it that many."""
    step_s = spec.pace.step_s
    for nodes, fewer in spec.pace.slower.items():
        warn(
            f"pace: with {nodes} nodes a step of {spec.name or 'the job'} takes {step_s[nodes - 1]:g} s, and with "
            f"{fewer} only {step_s[fewer - 1]:g} s: the policy waf leaves it {fewer}, unless it needs more"
        )


def _print_nothing(_: str) -> None:
    pass


def _parse_sizes(text: str) -> tuple[int, int]:
    """Return the least and most nodes of `MIN:MAX`; a single number is both.

    Raises:
        BadInputError: they are not numbers from 1 to 4096 in this order.
    """
    first, colon, last = text.partition(":")
    least, most = first, last if colon else first
    if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most) <= 4096):
        raise BadInputError(f"--nodes is {text!r}: give MIN:MAX, such as 1:8, from 1 on")
    return int(least), int(most)


def _job_to_measure(spec: JobSpec, nodes: int) -> JobSpec:
    """Return a copy of a job for measurements. It saves nothing, and gets nodes last.

    It does not write to the files of the original, which may train meanwhile, and sends no alerts.
    """
    output = msgspec.structs.replace(spec.output, events="", metrics_file="", log_dir="", alert="")
    return msgspec.structs.replace(
        spec,
        name=f"{spec.name[:54]}-calibrate",
        min_nodes=nodes,
        max_nodes=nodes,
        sizes=(),
        weight=_WEIGHT,
        priority=_PRIORITY,
        preemptible=False,
        snooze=0.0,
        time_limit=0.0,
        checkpoint=CheckpointSpec(),
        output=output,
        pace=PaceSpec(),
    )


def _measure(
    client: PoolClient, spec: JobSpec, sizes: tuple[int, int], patience: float, *, print_status: Callable[[str], None]
) -> tuple[dict[str, Any], str]:
    """Submit a copy of the job, measure its step time with each number of nodes, and end it.

    Return the measurements so far, and why some are missing ("" if none are): errors and Ctrl-C do not lose them. The
    first number of nodes that cannot be measured ends the measurement.

    Args:
        sizes: the least and the most nodes.
        patience: longest wait in seconds for each number of nodes.
    """
    found: dict[str, Any] = {}
    number = client.submit(spec)
    try:
        for size in range(sizes[0], sizes[1] + 1):
            retry_request(partial(client.update, spec.name, {"max_nodes": size, "sizes": []}))
            why = _await_size(client, spec.name, number, size, patience, found)
            if why:
                return found, why
            print_status(f"{size} {'node' if size == 1 else 'nodes'}: {found['step_s'][str(size)]:.4g} s a step")
        return found, ""
    except HoldfastError as error:
        return found, str(error)
    except KeyboardInterrupt:
        return found, _INTERRUPTED
    finally:
        with contextlib.suppress(HoldfastError):  # If the pool is gone, the measurements still count.
            job = retry_query(lambda: client.job(spec.name))
            if job["submission"] == number and job["state"] not in OVER:
                client.stop(spec.name)


def _ask_for_size(client: PoolClient, name: str, more: int, size: int) -> bool:
    """Ask for exactly `size` nodes, if the `more` that the job lacks are idle. Return whether that was asked for.

    A policy that counts what jobs achieve does not give a job more nodes if it was slower with more. Nodes that other
    jobs have, or that are kept back for them, are not asked for.
    """
    pool = retry_query(client.status)
    idle = sum(node["here"] and not (node["job"] or node["drained"]) for node in pool["nodes"])
    waiting = sum(node["standby"] for node in pool["nodes"])
    if idle - max(0, pool["reserve"] - waiting) < more:
        return False
    retry_request(partial(client.update, name, {"max_nodes": size, "sizes": [size]}))
    return True


def _await_size(client: PoolClient, name: str, number: int, size: int, patience: float, found: dict[str, Any]) -> str:
    """Wait until steps with `size` nodes were measured. Return why they were not, or "" if they were.

    If the job has fewer nodes and the pool has idle ones, the pool is asked once to give it exactly `size`. The pool's
    measurements are put into `found`. The wait ends after `patience` seconds, or with submission `number` of the job.
    """
    until, asked = time.monotonic() + patience, False
    job: Mapping[str, Any] = {}
    while time.monotonic() < until:
        job = retry_query(lambda: client.job(name))
        if not asked and 0 < len(job.get("nodes", ())) < size:
            asked = _ask_for_size(client, name, size - len(job["nodes"]), size)
        if job["submission"] != number:
            return f"{name} is another job by now"
        if job["pace"] is not None:
            found.update(job["pace"])
            if str(size) in job["pace"]["step_s"]:
                return ""
        if job["state"] in OVER:
            return f"{name} is over: {job['state']}{': ' if job['why'] else ''}{job['why']}"
        time.sleep(POLL_S)
    waits = job.get("why") or f"it has {len(job.get('nodes', ()))} nodes"
    return f"no steps with {size} nodes were measured within {patience:g} s: {waits}"


def _document(found: Mapping[str, Any], most: int) -> dict[str, Any]:
    """Return the `[pace]` section: step times for 1 to `most` nodes (0: unknown), and the job's units of work.

    The step times end with the last number of nodes that was measured.
    """
    step_s: Mapping[str, float] = found.get("step_s", {})
    known = [round(step_s.get(str(nodes), 0.0), 6) for nodes in range(1, most + 1)]
    while known and not known[-1]:
        known.pop()
    return {
        "step_s": known,
        "micro_batches": found.get("micro_batches", 0),
        "samples": found.get("samples", 0),
        "places": _places(found.get("layouts", ()), len(known)),
    }


def _places(layouts: Sequence[Mapping[str, int]], most: int) -> list[int]:
    """Return how many workers hold one replica with 1, 2, ... `most` nodes; [] without layouts, if it is always one.

    Args:
        layouts: the changes of this number, by node count: each holds from its `nodes` on.
    """
    places = [1] * most if layouts else []
    for one in layouts:
        places[one["nodes"] - 1 :] = [one["places"]] * (most - one["nodes"] + 1)
    return places


def _counted(found: Mapping[str, Any], given: OutputSpec) -> dict[str, float]:
    """Return the FLOP per sample that the copy has counted, or {} if the job's settings contain it."""
    flop: float = found.get("flop_per_sample", 0.0)
    return {"flop_per_sample": flop} if flop and not given.flop_per_sample else {}


def _toml(document: Mapping[str, Any], counted: Mapping[str, float]) -> str:
    """Return the measurements as TOML for the job's file: a section `[pace]`, and a section `[output]` with the entry
    in `counted`, if there is one.
    """
    step_s = ", ".join(f"{seconds!r}" for seconds in document["step_s"])
    text = (
        f"[pace]\nstep_s = [{step_s}]\nmicro_batches = {document['micro_batches']}\nsamples = {document['samples']}\n"
    )
    text += f"places = {document['places']}\n" if document["places"] else ""
    return text + "".join(f"\n[output]\n{key} = {value!r}\n" for key, value in counted.items())
