"""Tests of `holdfast status`: one line per node within 80 columns, with notes."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from holdfast.cli.job.status import SLOW, gpu_problems, print_status, quarantined, saving, slow_workers
from holdfast.cli.output import seconds_in_words


def worker(rank: int | None, step: int | None, **more: Any) -> dict[str, Any]:
    return {"worker": "w", "pid": 7, "rank": rank, "generation": 2, "step": step, "finished": False, **more}


def node(name: str, *workers: dict[str, Any], **more: Any) -> dict[str, Any]:
    known = {"rack": "", "zone": "", "standby": "", "leaving": False, "failure_rate": 1.0, "agent_pid": 6}
    return {"node": name, "seen_s_ago": 0.25, "workers": list(workers), **known, **more}


def scored(name: str, rank: int, score: float) -> dict[str, Any]:
    return {"worker": f"{name}/0/abc", "rank": rank, "score": score}


ANSWER: dict[str, Any] = {
    "job": "gpt",
    "state": "running",
    "world_size": 5,
    "step": 12_345_678,
    "loss": 2.5,
    "waiting_for": "",
    "url": "http://127.0.0.1:4000",
    "nodes": [
        node("standby-0", worker(None, None), standby="warm"),
        node("node-2", worker(2, 12_345_678), worker(3, 12_345_678)),
        node("node-1", worker(1, 12_345_678), leaving=True),
        node("node-3", worker(None, None)),
        node("node-0", worker(0, 12_345_677, finished=True), rack="[r1]"),
    ],
    "leaving": [{"node": "node-1", "stays": True, "to": "standby-0", "waits_for": "a commit"}],
    "paces": [scored("node-2", 3, 2.04), scored("node-0", 0, SLOW - 0.01)],
    "links": [scored("node-2", 2, 1.0)],
    "experts": {
        "fault_threshold": {"asked": 2, "given": 1},
        "layers": [{"node-0": [0, 1], "node-2": [2]}, {"node-0": [0, 1], "node-2": [2]}],
    },
}


def shown(width: int = 80, *, wide: bool = False, **more: Any) -> list[str]:
    console = Console(width=width, file=StringIO())
    print_status({**ANSWER, **more}, console, wide=wide)
    assert isinstance(console.file, StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


GPU: dict[str, Any] = {
    "index": 3, "name": "H100", "memory_used": 3_200_000_000, "memory_total": 80_000_000_000, "temperature_c": 87,
    "throttled": "", "ecc_errors": 0, "xids": [], "problem": "",
}  # fmt: skip


def test_gpu_problems_are_shown_in_the_nodes_note() -> None:
    bad = {**GPU, "xids": (31, 79), "ecc_errors": 2, "throttled": "heat (hardware)"}
    assert gpu_problems(GPU) == []
    assert gpu_problems({**GPU, "ecc_errors": 1}) == ["1 uncorrected ECC error"]
    assert gpu_problems(bad) == ["Xid 31 79", "2 uncorrected ECC errors", "throttled by heat (hardware)"]
    nodes = [node("node-0", worker(0, 7), gpus=[GPU]), node("node-1", worker(1, 7), gpus=[{**GPU, "xids": [79]}])]
    healthy, sick = shown(nodes=nodes, leaving=[], paces=[], links=[])[-2:]
    assert healthy.split() == ["node-0", "training", "0", "7", "0.2", "s", "ago"]
    assert sick.endswith("GPU 3: Xid 79")


def test_wide_lists_the_gpus() -> None:
    lost = {**GPU, "index": 4, "memory_total": 0, "temperature_c": 0, "problem": "GPU is lost"}
    lines = shown(wide=True, nodes=[node("node-0", worker(0, 7), gpus=[GPU, lost])], experts=None)
    first = lines.index("node    GPU  name  memory used     temperature  problems")
    assert lines[first + 1 : first + 3] == [
        "node-0  3    H100  3.2 of 80.0 GB  87 C         none",
        "node-0  4    H100  -               -            GPU is lost",
    ]


def test_nodes_are_listed_in_rank_order_within_80_columns() -> None:
    assert shown() == [
        "gpt: running, step 12345678, loss 2.5000, 5 workers",
        "",
        "node       state     rank  step      last word  note",
        "node-0     done      0     12345677  0.2 s ago",
        "node-1     leaving   1     12345678  0.2 s ago  gives its place to standby-0,",
        "                                                waits for a commit",
        "node-2     training  2-3   12345678  0.2 s ago  slow: computing takes rank 3",
        "                                                2.0x as long",
        "node-3     joining   -     -         0.2 s ago",
        "standby-0  standby   -     -         0.2 s ago  warm",
    ]


def test_wide_shows_processes_racks_and_experts() -> None:
    lines = shown(160, wide=True)
    assert any(
        line.startswith("node-0     done      0     12345677  0.2 s ago  [r1]  -     6          7") for line in lines
    )
    assert "url: http://127.0.0.1:4000" in lines
    assert "each expert is on at least 1 nodes (asked: 2)" in lines
    assert lines[-1] == "0-1    0 1     2"


def test_a_job_without_nodes_and_steps_is_shown() -> None:
    lines = shown(state="waiting", step=0, loss=None, world_size=0, waiting_for="2 nodes", nodes=[], leaving=[])
    assert lines == ["gpt: waiting", "waiting for 2 nodes"]


def test_a_narrow_terminal_shows_each_node() -> None:
    lines = shown(40)
    assert lines[3:] == [
        "node-0     done      0     12345677",
        "node-1     leaving   1     12345678",
        "node-2     training  2-3   12345678",
        "node-3     joining   -     -",
        "standby-0  standby   -     -",
        "standby-0: warm",
        "node-1: gives its place to standby-0, waits for a commit",
        "node-2: slow: computing takes rank 3 2.0x as long",
    ]


def test_a_long_node_name_does_not_hide_other_columns() -> None:
    long = [node("train-gpt-worker-" + "x" * 40 + str(number), worker(number, 100 + number)) for number in range(2)]
    for width in (40, 80):
        lines = shown(width, nodes=long, leaving=[], paces=[])[3:]
        for number, line in enumerate(lines):
            assert line.startswith("t")
            assert line.split()[0].endswith(f"xx{number}")
            assert line.split()[1:4] == ["training", str(number), str(100 + number)]
    assert long[1]["node"] in "\n".join(shown(80, nodes=long, wide=True))


def test_wide_does_not_truncate_columns() -> None:
    many = [worker(rank, 12_345_678) for rank in range(64)]
    lines = shown(80, nodes=[node("node-0", *many, zone="z" * 40, standby="warm" * 20)], leaving=[], wide=True)
    assert not [line for line in lines if "…" in line]
    assert len([line for line in lines if line.startswith("node-0")]) == 1


def test_slow_workers_are_listed_with_their_slowdown() -> None:
    assert list(slow_workers(ANSWER)) == [("node-2", "slow: computing takes rank 3 2.0x as long")]
    assert list(slow_workers({})) == []


def test_a_quarantined_node_is_shown_with_the_command_to_readmit_it() -> None:
    answer = {"quarantined": [{"node": "n1", "host": "", "why": "fan [3] stands", "since": 0.0}]}
    (line,) = quarantined(answer)
    assert line.startswith("quarantined since ")
    assert line.endswith("n1 (fan [3] stands); once repaired: holdfast undrain n1")
    assert list(quarantined({})) == []


def test_the_snapshot_and_the_checkpoint_period_are_shown() -> None:
    assert list(saving({"snapshot": None, "saving": None})) == []
    (line,) = saving({"snapshot": {"step": 40, "copies": 2}, "saving": None})
    assert line == "snapshot of step 40 in memory, with 2 or more copies of each part"
    known = {"every": 50, "period_s": None, "cost_s": 0.0, "saves": 0, "losses": 0}
    assert list(saving({"saving": known})) == ["a checkpoint every 50 steps"]
    (line,) = saving({"saving": {**known, "period_s": 600.0, "cost_s": 0.5, "saves": 3, "losses": 1}})
    assert line == "a checkpoint every 10 min; one costs 0.500 s, and 1 were used"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.25, "0.2 s"),
        (9.96, "10.0 s"),
        (75, "75 s"),
        (119.9, "120 s"),
        (3599, "1 h 0 min"),
        (7500, "2 h 5 min"),
        (2e5, "2 days"),
        (float("inf"), "-"),
        (float("nan"), "-"),
        (1e300, "-"),
    ],
)
def test_durations_have_at_most_two_units(seconds: float, words: str) -> None:
    assert seconds_in_words(seconds) == words
