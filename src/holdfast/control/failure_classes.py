"""Reads the file with a site's own classes of failures. Errors name the line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from holdfast.coordination.failures.classes import find_rule_errors
from holdfast.documents import check_known, load_toml, open_given, shorten
from holdfast.errors import BadInputError
from holdfast.protocol.failures import MAX_RULES, Detector, FailureRule

_KEYS = tuple(FailureRule.__struct_fields__)
_MUST_BE = {
    "pattern": "a regular expression of 1 to 500 characters",
    "status": r"a name of at most 64 lower-case letters, digits, _, or \1 for what the pattern's first group has found",
    "severity": "1 (the node goes out), 2 (the process starts again) or 3 (the same members try again)",
    "detector": f"one of {', '.join(Detector)}",
}


def read_rules(path: str) -> tuple[FailureRule, ...]:
    """Return the rules of a TOML file with a `[[class]]` table for each, in their order, or () for "".

    Raises:
        BadInputError: it cannot be read, has other keys or more than `MAX_RULES` rules, or a rule is wrong: a bad
            value, or a pattern that can never match. The message names the line of the rule, or its number.
    """
    if not path:
        return ()
    file = Path(path)
    document = load_toml(file)
    for key in document:
        check_known(key, ("class",), f"{path}: {key}")
    tables: object = document.get("class", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in cast(list[object], tables)):
        raise BadInputError(
            f"{path}: class is {shorten(document['class'])}: write each rule under a [[class]] of its own"
        )
    with open_given(file) as stream:
        lines = _find_rule_lines(stream.read().decode("utf-8-sig"))
    given = cast(list[Mapping[str, Any]], tables)
    if len(given) > MAX_RULES:
        raise BadInputError(f"{path}: has {len(given)} rules: at most {MAX_RULES} are looked at for each failure")
    known = len(lines) == len(given)  # otherwise the rules use another TOML syntax, and their lines are not known
    where = [f"{path}, line {lines[n]}" if known else f"{path}, rule {n + 1}" for n in range(len(given))]
    rules = tuple(_to_rule(table, place) for table, place in zip(given, where, strict=True))
    for number, why in find_rule_errors(rules):
        raise BadInputError(f"{where[number]}: {why}")
    return rules


def _find_rule_lines(text: str) -> list[int]:
    """Return the line of the pattern of each rule, or the first line of a rule without a pattern."""
    lines: list[int] = []
    begun = False
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r"\s*\[\[\s*class\s*\]\]", line):
            lines.append(number)
            begun = True
        elif begun and re.match(r"\s*[\"']?pattern[\"']?\s*=", line):
            lines[-1], begun = number, False
    return lines


def _to_rule(table: Mapping[str, Any], place: str) -> FailureRule:
    """Convert a table to a rule.

    Args:
        table: the keys and values of one `[[class]]`.
        place: file and line, for the errors.

    Raises:
        BadInputError: a key is unknown or missing, or its value is invalid.
    """
    for key in table:
        check_known(key, _KEYS, f"{place}: {key}")
    for key in ("pattern", "status", "severity"):
        if key not in table:
            raise BadInputError(f"{place}: {key} is missing: it must be {_MUST_BE[key]}")
    try:
        return msgspec.convert({"type": "FailureRule", **table}, FailureRule)
    except msgspec.ValidationError as error:
        found = re.search(r"\$\.(\w+)", str(error))
        key = found.group(1) if found is not None else "pattern"
        raise BadInputError(f"{place}: {key} is {shorten(table[key])}: it must be {_MUST_BE[key]}") from None
