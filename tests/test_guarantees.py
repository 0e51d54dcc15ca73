"""Every promise in docs/guarantees.md names an existing test, and so does every pair of features."""

from __future__ import annotations

import ast
import re

from places import ROOT

PAGE = (ROOT / "docs" / "guarantees.md").read_text()
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def table(after: str) -> list[list[str]]:
    """Return the cells of the table below a heading, without its separator row."""
    lines = PAGE.split(f"## {after}\n")[1].split("\n## ")[0].splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows if set(row[0].strip()) != {"-"}]


def test_every_test_named_on_the_page_exists() -> None:
    named = NAMED.findall(PAGE)
    assert len(named) > 30
    for file in {file for file, _ in named}:
        tree = ast.parse((ROOT / file).read_text())
        there = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert {name for path, name in named if path == file} <= there, file


def test_every_promise_names_a_test() -> None:
    for heading in ("Steps", "Samples", "Bits"):
        header, *promises = table(heading)
        assert header == ["promise", "holds", "it costs", "tests"]
        assert [promise[0] for promise in promises if not NAMED.search(promise[-1])] == []


def test_every_pair_of_features_is_tested_or_refused() -> None:
    header, *rows = table("Features together")
    columns = header[1:]
    legend = dict(re.findall(r"^- (\w): .*?`(tests/[^`]+)`", PAGE, re.MULTILINE))
    features = [name.strip("*") for name, *_ in rows]
    assert [*columns[:1], *features[: len(columns) - 1]] == columns, "rows and columns must have the same order"
    for place, row in enumerate(rows):
        cells = row[1:]
        assert all(cell in legend for cell in cells[: place + 1]), row
        assert not any(cells[place + 1 :]), row
    used = {cell for row in rows for cell in row[1:] if cell}
    assert used == set(legend), "every mark in the legend must be used"
