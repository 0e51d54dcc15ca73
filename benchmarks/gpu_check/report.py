"""The results of a run as files: JSON for programs, a Markdown table for people."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.options import Figures
from benchmarks.gpu_check.runner import Outcome

#: Bytes of each log file that are kept.
LOG_BYTES = 4_000_000


def write_results(folder: Path, machine: Mapping[str, Any], outcomes: Sequence[Outcome]) -> Path:
    """Write `gpu-check-<device>.json` and the same as a table beside it; return the path of the JSON file.

    Args:
        machine: facts of the machine; "gpu" names the device.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = f"gpu-check-{re.sub('[^a-z0-9]+', '-', str(machine.get('gpu', 'unknown')).lower()).strip('-')}"
    path = folder / f"{name}.json"
    results = {"machine": dict(machine), "checks": [dataclasses.asdict(outcome) for outcome in outcomes]}
    _replace(path, json.dumps(results, indent=1) + "\n")
    _replace(path.with_suffix(".md"), as_markdown(machine, outcomes))
    return path


def copy_logs(folder: Path, check: str, logs: Path) -> None:
    """Copy the events and the output of a check's jobs, the end of each."""
    for path in (*(folder / check).glob("*/events.jsonl"), *(folder / check).glob("*/output.txt")):
        target = logs / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes()[-LOG_BYTES:])


def as_markdown(machine: Mapping[str, Any], outcomes: Sequence[Outcome]) -> str:
    """Return a table of the outcomes."""
    facts = ", ".join(f"{name} {value}" for name, value in machine.items() if not isinstance(value, dict | list))
    lines = [facts, "", "| check | result | figures |", "| --- | --- | --- |"]
    for outcome in outcomes:
        result = outcome.status + (f": {outcome.reason}" if outcome.reason else "")
        cells = (outcome.name, result, "; ".join(_flat(outcome.figures)))
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _flat(figures: Figures, before: str = "") -> list[str]:
    """Return one text for each figure, nested ones with their path."""
    texts: list[str] = []
    for name, value in figures.items():
        if isinstance(value, dict):
            texts += _flat({str(key): one for key, one in value.items()}, f"{before}{name} ")  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType] - JSON
        else:
            shown = f"{value:.4g}" if isinstance(value, float) else str(value)
            texts.append(f"{before}{name} {shown}")
    return texts


def _replace(path: Path, text: str) -> None:
    """Write a file at once: a reader never sees a part of it."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(text)
    os.replace(beside, path)
