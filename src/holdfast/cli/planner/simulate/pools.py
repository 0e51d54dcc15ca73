"""`holdfast simulate --availability`: the achieved FLOP of a pool's jobs through a trace, by policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.cli.output import print_json, print_line
from holdfast.cli.planner.spares.report import duration, percent, table
from holdfast.cli.pool.calibrate import warn_of_pace
from holdfast.cli.spec_options import job_spec
from holdfast.documents import open_given, read_toml
from holdfast.errors import BadInputError
from holdfast.planner.fleet.case import FleetCase
from holdfast.planner.fleet.pool.comparison import MACHINE_NODES, best_waf_without_failures, simulate_pool
from holdfast.planner.fleet.pool.gpt_tasks import make_table_3_jobs
from holdfast.planner.fleet.pool.outages import (
    MOST_S,
    TRACE_A,
    TRACE_B,
    FleetTrace,
    draw_trace,
    make_trace,
    scale_drawing,
)
from holdfast.planner.fleet.pool.systems import HoldfastTimes, System, find_system, list_assumptions
from holdfast.planner.fleet.pool.tasks import FleetTask
from holdfast.planner.fleet.pool.trace_run import PoolResult
from holdfast.planning.availability import parse_trace
from holdfast.planning.waf.pace import StepTimes
from holdfast.protocol.job_spec import JobSpec

#: traces that are drawn, by what `--availability` calls them
DRAWN = {"trace-a": TRACE_A, "trace-b": TRACE_B}
#: nodes of the paper's testbed
PAPERS_NODES = 16
#: the policies that are compared by default
COMPARED = ("waf", "equal", "weighted", "hit-only", "megatron")
_MOST_NODES = 4096
_MOST_TRACE_BYTES = 64 << 20
_MOST_HOURS = int(MOST_S / 3600)


def read_trace_of(name: str, nodes: int | None, hours: float | None, seed: int) -> FleetTrace:
    """Return the chosen trace.

    Args:
        name: path of a file, or the name of a trace in `DRAWN`.
        nodes: nodes of a drawn trace, or the most that may be up in a file's trace; None for the default.
        hours: end of a file's trace, or None for its last line. A drawn trace has its own length, and refuses it.
        seed: for drawn traces, and for what is drawn about a file's failures.

    Raises:
        BadInputError: an argument is out of range, the trace cannot be read, or a line breaks a rule.
    """
    if nodes is not None and nodes > _MOST_NODES:
        raise BadInputError(
            f"{nodes:,} nodes are too many for a pool to be simulated: give --nodes {_MOST_NODES} at most"
        )
    if seed < 0:
        raise BadInputError(f"--seed is {seed}: it must be 0 or more")
    if name in DRAWN:
        if hours is not None:
            raise BadInputError(f"--hours is {hours:g}: {name} has its own length; leave one of them out")
        count = PAPERS_NODES if nodes is None else nodes
        return draw_trace(scale_drawing(DRAWN[name], count, PAPERS_NODES), count, seed)
    if hours is not None and not 0 < hours <= _MOST_HOURS:
        raise BadInputError(f"--hours is {hours:g}: give when the trace ends, above 0 and {_MOST_HOURS:,} at most")
    try:
        with open_given(Path(name)) as file:
            text = file.read(_MOST_TRACE_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise BadInputError(f"the trace {name} cannot be read: {why}; or give {' or '.join(DRAWN)}") from None
    if len(text) > _MOST_TRACE_BYTES:
        raise BadInputError(f"the trace {name} has more than {_MOST_TRACE_BYTES >> 20} MiB: give a part of it")
    end = None if hours is None else 3600.0 * hours
    try:
        events = parse_trace(text, faults=True)
        return make_trace(name, events, nodes=_MOST_NODES if nodes is None else nodes, end=end, seed=seed)
    except BadInputError as error:
        raise BadInputError(f"{name}: {error}") from None


def read_tasks(files: Sequence[Path], nodes: int) -> list[FleetTask]:
    """Return the jobs of job.toml files, or without any the jobs of Unicron's Table 3, case 5, for up to `nodes` nodes.

    Raises:
        BadInputError: a file cannot be read, or lacks what is needed to compute the achieved FLOP.
    """
    if not files:
        return make_table_3_jobs(5, nodes)
    return [_task(path) for path in files]


def _task(path: Path) -> FleetTask:
    """Return the job of a job.toml file, with its step time for each number of nodes.

    Raises:
        BadInputError: the file lacks measured step times or the FLOP of a sample.
    """
    spec = job_spec(read_toml(path, JobSpec))
    pace = spec.pace
    pace.check()
    warn_of_pace(spec)
    if not any(pace.step_s) or not (pace.micro_batches and pace.samples):
        raise BadInputError(
            f"{path}: pace says nothing of how long a step takes: measure it (holdfast calibrate {path} --nodes 1:N)"
        )
    if not spec.output.flop_per_sample:
        raise BadInputError(f"{path}: output.flop_per_sample is 0: say how many FLOP training on a sample takes")
    flop = pace.samples * spec.output.flop_per_sample
    times = StepTimes(
        step_s=pace.known,
        micro_batches=pace.micro_batches,
        workers=spec.workers_per_node,
        flop=flop,
        places=pace.places,
    )
    return FleetTask(
        name=spec.name or path.stem,
        step_s=tuple((flop / times.throughput(spec.max_nodes)[1:]).tolist()),
        flop=flop,
        weight=spec.weight,
        least=spec.nodes_to_begin,
        most=spec.max_nodes,
        sizes=tuple(sorted(set(spec.sizes))),
    )


def read_systems(names: str | None, case: FleetCase) -> list[System]:
    """Return the systems with these names, separated by commas; None for those in `COMPARED`.

    Our own systems get the times of the case.

    Raises:
        BadInputError: a name is unknown, or is given twice.
    """
    asked = [name.strip() for name in names.split(",")] if names is not None else list(COMPARED)
    if len(set(asked)) < len(asked):
        raise BadInputError(f"--policy is {names}: name each once")
    own = HoldfastTimes(case=case)
    found = [find_system(name) for name in asked]
    return [replace(system, times=own) if isinstance(system.times, HoldfastTimes) else system for system in found]


def show_pool(tasks: Sequence[FleetTask], trace: FleetTrace, systems: Sequence[System], *, as_json: bool) -> None:
    """Simulate the jobs with each system, and print a table of results with its assumptions.

    Raises:
        BadInputError: there are too few nodes for the jobs.
    """
    lived = {system.name: simulate_pool(system, tasks, trace) for system in systems}
    most = best_waf_without_failures(tasks, trace.most_nodes) * trace.seconds
    if as_json:
        print_json(_document(tasks, trace, systems, lived, most))
        return
    print_line(f"{trace.name}: {len(trace.nodes):,} nodes, {duration(trace.seconds / 3600)};")
    print_line(f"{trace.count('lost'):,} nodes lost, {trace.count('fault'):,} other failures; {len(tasks)} jobs\n")
    print_line(table(_HEADERS, [_row(name, one, most, lived[systems[0].name]) for name, one in lived.items()]))
    print_line("\nAccumulated WAF: weighted FLOP of all jobs; its share: of the FLOP of all nodes without failures.")
    print_line("What is assumed:")
    for line in list_assumptions(systems):
        print_line(f"  {line}")
    if len(trace.nodes) > MACHINE_NODES:
        print_line(f"  with more than {MACHINE_NODES:,} nodes the pool's policies are asked without its machine")


_HEADERS = ["policy", "accumulated WAF", "share", "of the first's", "stopped", "too few nodes", "hits"]


def _row(name: str, lived: PoolResult, most: float, first: PoolResult) -> list[str]:
    """Return the table's cells for a system: its name, WAF, share of `most`, and WAF relative to the first system.

    Then how long jobs were stopped with enough nodes, how long for lack of nodes, and how many failures struck them.
    """
    beside = f"{lived.total / first.total:.4f}" if first.total else "-"
    stopped, short = (duration(sum(times.values()) / 3600) for times in (lived.stopped_s, lived.short_s))
    return [name, f"{lived.total:.4g}", percent(lived.total / most, 2), beside, stopped, short, f"{lived.hits:,}"]


def _document(
    tasks: Sequence[FleetTask],
    trace: FleetTrace,
    systems: Sequence[System],
    lived: Mapping[str, PoolResult],
    most: float,
) -> dict[str, Any]:
    return {
        "trace": {
            "name": trace.name,
            "nodes": len(trace.nodes),
            "seconds": trace.seconds,
            "most_nodes": trace.most_nodes,
            "lost": trace.count("lost"),
            "faults": trace.count("fault"),
        },
        "jobs": [
            {"name": task.name, "weight": task.weight, "min_nodes": task.least, "max_nodes": task.largest}
            for task in tasks
        ],
        "undisturbed_waf": most,
        "policies": {
            system.name: {
                "accumulated_waf": lived[system.name].total,
                "by_job": lived[system.name].achieved,
                "stopped_s": lived[system.name].stopped_s,
                "too_few_nodes_s": lived[system.name].short_s,
                "hits": lived[system.name].hits,
                "waf_from": lived[system.name].steps,
                "efficiency": system.efficiency,
                "assumes": system.assumes,
            }
            for system in systems
        },
    }
