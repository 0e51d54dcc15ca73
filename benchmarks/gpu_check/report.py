"""Writes the results of a run as files: JSON for programs, a Markdown table for people."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.options import Figures
from benchmarks.gpu_check.runner import Outcome, read_end

#: Bytes of each log file that are kept.
LOG_BYTES = 4_000_000


def results_path(folder: Path, machine: Mapping[str, Any]) -> Path:
    """Return the path of a machine's results, `gpu-check-<gpu>.json`; the table next to it ends with `.md`."""
    gpu = re.sub("[^a-z0-9]+", "-", str(machine.get("gpu", "unknown")).lower()).strip("-")
    return folder / f"gpu-check-{gpu}.json"


def write_results(folder: Path, machine: Mapping[str, Any], outcomes: Sequence[Outcome]) -> Path:
    """Write the results as JSON and as a table; return the path of the JSON file.

    Args:
        machine: facts of the machine; "gpu" names the device.
    """
    path = results_path(folder, machine)
    results = {"machine": dict(machine), "checks": [dataclasses.asdict(outcome) for outcome in outcomes]}
    _replace(path, json.dumps(results, indent=1) + "\n")
    _replace(path.with_suffix(".md"), as_markdown(machine, outcomes))
    return path


def copy_logs(folder: Path, check: str, logs: Path) -> None:
    """Copy the end of the events and of the output of each of a check's jobs."""
    for path in (*(folder / check).glob("*/events.jsonl"), *(folder / check).glob("*/output.txt")):
        target = logs / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(read_end(path, LOG_BYTES))


def as_markdown(machine: Mapping[str, Any], outcomes: Sequence[Outcome]) -> str:
    """Return a table of the outcomes."""
    facts = ", ".join(f"{name} {value}" for name, value in machine.items() if not isinstance(value, dict | list))
    lines = [_on_one_line(facts), "", "| check | result | figures |", "| --- | --- | --- |"]
    for outcome in outcomes:
        result = outcome.status + (f": {outcome.reason}" if outcome.reason else "")
        cells = (outcome.name, result, "; ".join(_flat(outcome.figures)))
        lines.append("| " + " | ".join(_on_one_line(cell).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _flat(figures: Figures, prefix: str = "") -> list[str]:
    """Return one text per figure; the text of a nested figure starts with the names of its parents."""
    texts: list[str] = []
    for name, value in figures.items():
        if isinstance(value, dict):
            texts += _flat({str(key): one for key, one in value.items()}, f"{prefix}{name} ")  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType] - JSON
        else:
            shown = f"{value:.4g}" if isinstance(value, float) else str(value)
            texts.append(f"{prefix}{name} {shown}")
    return texts


def _on_one_line(text: str) -> str:
    """Return the text without line breaks and other characters that cannot be printed."""
    return "".join(character if character.isprintable() else " " for character in text)


def _replace(path: Path, text: str) -> None:
    """Write a file atomically, so that a reader never sees a partial file."""
    # Two runs may write the same results at the same time.
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
