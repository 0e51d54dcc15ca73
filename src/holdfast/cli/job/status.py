"""`holdfast status`: where a job stands, and one line for each node, within 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast.cli.connection import Server
from holdfast.cli.following.progress import count, loss_text, time_of_day
from holdfast.cli.following.time_table import print_account
from holdfast.cli.options import with_option_groups
from holdfast.cli.output import AsJson, on_one_line, print_json, print_line, seconds_in_words
from holdfast.observability.accounts.time_ledger import TimeAccount
from holdfast.protocol.names import node_of

#: a worker that takes this many times as long as the others is reported as slow
SLOW = 1.5

#: characters of a node's name that are shown in a narrow terminal, too
_SHORTEST_NAME = 12
#: A terminal with fewer columns has no room for the time of the last word and the note.
_NARROW = 60
#: columns of a line of --wide, at most
_WIDE = 4096

Answer = Mapping[str, Any]


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("status")(with_option_groups(status))


def status(
    server: Server,
    wide: Annotated[bool, typer.Option("--wide", "-w", help="Add processes, racks, experts, time spent.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the progress of a job, and its nodes.

    For a pool's job without nodes, or one that has ended, it shows the state and the reason only.
    """
    if (pool := server.find_pool_of_job()) is not None:
        with pool as client:
            pooled = client.job(server.job or "")
        if pooled["state"] != "admitted":  # Only an admitted job has a coordinator.
            _print_pooled(pooled, as_json=as_json)
            return
    with server.client() as client:
        answer = client.status()
    if as_json:
        print_json(answer)
    else:
        print_status(answer, Console(), wide=wide)


def _print_pooled(job: Answer, *, as_json: bool) -> None:
    """Print the state and reason of a pool's job that has no nodes or has ended; if it failed, how to read its output.

    With `as_json`, print the pool's answer `job` only.
    """
    if as_json:
        print_json(job)
        return
    print_line(on_one_line(f"{job['job']}: {job['state']}{': ' if job['why'] else ''}{job['why']}"))
    if job["state"] == "failed" and job["log_dir"]:
        print_line(f"its output: holdfast logs -j {job['job']}")


def print_status(answer: Answer, console: Console, *, wide: bool) -> None:
    """Print a job's status: progress, checkpoints, drained and quarantined nodes, and a table of nodes.

    With `wide`, also addresses, GPUs, time by cause and experts, which may need more than 80 columns.
    """
    lines = [*_summary(answer), *saving(answer), *drained(answer), *quarantined(answer)]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if answer.get("nodes"):
        table = _node_table(answer, columns=None if wide else console.width)
        if wide:  # A line that the terminal wraps is better than values that are cut off.
            console.width = max(console.width, _WIDE)
        console.print()
        console.print(table)
        if console.width < _NARROW:
            for name, notes in _notes(answer).items():
                console.print(f"{name}: {'; '.join(notes)}", markup=False, highlight=False, soft_wrap=True)
    if not wide:
        return
    console.print()
    for name in ("url", "coordinator_pid", "term", "generation", "events", "log_dir"):
        if answer.get(name) not in (None, ""):
            console.print(f"{name.replace('_', ' ')}: {answer[name]}", markup=False, highlight=False, soft_wrap=True)
    if any(node.get("gpus") for node in answer.get("nodes") or ()):
        console.print()
        console.print(_gpu_table(answer))
    if answer.get("time"):
        console.print()
        print_account(msgspec.convert(answer["time"], TimeAccount), console)
    if experts := answer.get("experts"):
        given = experts["fault_threshold"]
        console.print()
        console.print(f"each expert is on at least {given['given']} nodes (asked: {given['asked']})", highlight=False)
        console.print(_expert_table(experts["layers"]))


def _summary(answer: Answer) -> Iterator[str]:
    """Yield the lines about the job's state, step, loss, workers, awaited nodes, and share of time that trained."""
    facts = [f"{answer['job']}: {str(answer['state']).replace('_', ' ')}"]
    if answer.get("step"):
        last = answer.get("last_step")
        facts.append(f"step {answer['step']} of {last}" if last else f"step {answer['step']}")
    if answer.get("loss") is not None:
        facts.append(f"loss {loss_text(answer['loss'])}")
    if workers := answer.get("world_size"):
        facts.append(f"{workers} worker{'s' if workers > 1 else ''}")
    yield ", ".join(facts)
    if answer.get("waiting_for"):
        yield f"waiting for {answer['waiting_for']}"
    if time := answer.get("time"):
        yield f"trained {time['ettr']:.1%} of {seconds_in_words(time['wall_s'])}"


def saving(answer: Answer) -> Iterator[str]:
    """Yield which snapshot is in the nodes' memory, and how often checkpoints are saved and why.

    Nothing is yielded about a snapshot or checkpoints if `answer` has none.
    """
    if held := answer.get("snapshot"):
        yield f"snapshot of step {held['step']} in memory, with {held['copies']} or more copies of each part"
    known: Answer | None = answer.get("saving")
    if known is None:
        return
    if known["period_s"] is None:
        yield f"a checkpoint every {known['every']} steps"
        return
    why = f"; one costs {known['cost_s']:.3f} s, and {known['losses']} were used" if known["saves"] else ""
    yield f"a checkpoint every {seconds_in_words(known['period_s'])}{why}"


def drained(answer: Answer) -> Iterator[str]:
    """Yield which nodes have left in good order, and the command that lets them return."""
    nodes: Sequence[Answer] = answer.get("drained") or ()
    for one in nodes:
        yield f"drained: {one['node']}; to let it return: holdfast undrain {one['node']}"


def quarantined(answer: Answer) -> Iterator[str]:
    """Yield which nodes must not return, why, and the command that lets them."""
    nodes: Sequence[Answer] = answer.get("quarantined") or ()
    for one in nodes:
        since = time_of_day(one["since"])
        yield f"quarantined since {since}: {one['node']} ({one['why']}); once repaired: holdfast undrain {one['node']}"


# ---- the nodes ----


def _node_table(answer: Answer, *, columns: int | None) -> Table:
    """Return a table with one row for each node: members by rank, then standbys and others.

    Args:
        columns: The terminal's width; if it is small, some columns are left out. None adds all facts, and shows names
            in full.
    """
    wide, narrow = columns is None, columns is not None and columns < _NARROW
    longest_name = None if columns is None else max(columns * 3 // 10, _SHORTEST_NAME)
    names = ["node", "state", "rank", "step", *([] if narrow else ["last word"])]
    more = ["rack", "zone", "agent pid", "worker pids", "failure rate"] if wide else []
    table = Table(*names, *more, box=None, pad_edge=False, header_style="bold")
    for column in table.columns:
        column.no_wrap = True
    if not narrow:
        table.add_column("note")
    notes = _notes(answer)
    for node in sorted(answer["nodes"], key=_order):
        workers: Sequence[Answer] = node.get("workers") or ()
        ranks = sorted(worker["rank"] for worker in workers if worker["rank"] is not None)
        steps = {worker["step"] for worker in workers if worker["step"] is not None}
        row = [_shorten(node["node"], longest_name), _state(node, ranks), _ranks(ranks)]
        row.append(str(max(steps)) if steps else "-")
        if not narrow:
            row.append(f"{seconds_in_words(node['seen_s_ago'])} ago")
        if wide:
            pids = " ".join(str(worker["pid"]) for worker in workers)
            row += [node["rack"] or "-", node["zone"] or "-", str(node["agent_pid"]), pids or "-"]
            row += [f"{node['failure_rate']:g}"]
        if not narrow:
            row.append("; ".join(notes.get(node["node"], ())))
        table.add_row(*map(Text, row))
    return table


def _gpu_table(answer: Answer) -> Table:
    """Return a table with one row for each GPU that the agents can read: memory, temperature, problems."""
    table = Table("node", "GPU", "name", "memory used", "temperature", "problems", box=None, pad_edge=False)
    table.header_style = "bold"
    for node in sorted(answer["nodes"], key=_order):
        for gpu in node.get("gpus") or ():
            used, total = gpu["memory_used"] / 1e9, gpu["memory_total"] / 1e9
            heat = f"{gpu['temperature_c']} C" if gpu["temperature_c"] else "-"
            problems = "; ".join(gpu_problems(gpu)) or "none"
            memory = f"{used:.1f} of {total:.1f} GB" if total else "-"
            row = (node["node"], str(gpu["index"]), gpu["name"] or "-", memory, heat, problems)
            table.add_row(*map(Text, row))
    return table


def _shorten(name: str, longest: int | None) -> str:
    """Return a name of at most this many characters, or the whole name for None.

    If it is too long, its middle is cut out: its end tells nodes apart.
    """
    if longest is None or len(name) <= longest:
        return name
    tail = longest * 2 // 3
    return f"{name[: longest - tail - 3]}...{name[-tail:]}"


def _order(node: Answer) -> tuple[int, str]:
    ranks = [worker["rank"] for worker in node.get("workers") or () if worker["rank"] is not None]
    return (min(ranks) if ranks else 1 << 30), node["node"]


def _state(node: Answer, ranks: Sequence[int]) -> str:
    """Return the state of a node: standby, leaving, joining (no ranks yet), done or training."""
    if node.get("standby"):
        return "standby"
    if node.get("leaving"):
        return "leaving"
    if not ranks:
        return "joining"
    return "done" if all(worker["finished"] for worker in node["workers"]) else "training"


def _ranks(ranks: Sequence[int]) -> str:
    """Return the lowest and the highest of sorted ranks, such as "4-7", a single rank, or "-" for none."""
    if not ranks:
        return "-"
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def _notes(answer: Answer) -> dict[str, list[str]]:
    """Return the notes for each node that has any, by name: standby, leaving, slow workers, GPU problems."""
    notes: dict[str, list[str]] = {}
    nodes: Sequence[Answer] = answer["nodes"]
    for node in nodes:
        if node.get("standby"):
            notes.setdefault(node["node"], []).append(node["standby"])
    leaving: Sequence[Answer] = answer.get("leaving") or ()
    for one in leaving:
        what = f"gives its place to {one['to'] or 'a standby'}" if one["stays"] else "leaves"
        notes.setdefault(one["node"], []).append(f"{what}, waits for {one['waits_for']}")
    for node, note in slow_workers(answer):
        notes.setdefault(node, []).append(note)
    for node in nodes:
        for gpu in node.get("gpus") or ():
            if problems := gpu_problems(gpu):
                notes.setdefault(node["node"], []).append(f"GPU {gpu['index']}: {', '.join(problems)}")
    return notes


def gpu_problems(gpu: Answer) -> list[str]:
    """Return the problems of a GPU that its driver reports, in words, or [] if it reports none."""
    problems: list[str] = []
    if gpu["problem"]:
        problems.append(gpu["problem"])
    if gpu["xids"]:
        problems.append(f"Xid {' '.join(map(str, gpu['xids']))}")
    if gpu["ecc_errors"]:
        problems.append(count(gpu["ecc_errors"], "uncorrected ECC error"))
    if gpu["throttled"]:
        problems.append(f"throttled by {gpu['throttled']}")
    return problems


def slow_workers(answer: Answer) -> Iterator[tuple[str, str]]:
    """Yield the node of each worker that computes or sends `SLOW` times as long as the others, and how slow it is."""
    for key, what in (("paces", "computing"), ("links", "sending")):
        scored: Sequence[Answer] = answer.get(key) or ()
        for one in scored:
            if one["score"] >= SLOW:
                yield node_of(one["worker"]), f"slow: {what} takes rank {one['rank']} {one['score']:.1f}x as long"


# ---- the experts ----


def _expert_table(layers: Sequence[Mapping[str, Sequence[int]]]) -> Table:
    """Return a table of the experts of each node by layer. Adjacent layers with the same placement share a row."""
    nodes = list(layers[0])
    table = Table("layer", *nodes, box=None, pad_edge=False, header_style="bold")
    first = 0
    for layer in range(1, len(layers) + 1):
        if layer < len(layers) and layers[layer] == layers[first]:
            continue
        name = f"{first}-{layer - 1}" if layer - 1 > first else str(first)
        table.add_row(name, *[" ".join(map(str, layers[first][node])) for node in nodes])
        first = layer
    return table
