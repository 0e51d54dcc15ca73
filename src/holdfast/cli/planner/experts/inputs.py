"""What `holdfast experts plan` reads: loads, racks, slots and weights; everything wrong is named with its place."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any, cast

import numpy as np

from holdfast.cli.planner.experts.dumps import SUFFIXES, read_dump
from holdfast.cli.planner.experts.recording import read_all, read_recording
from holdfast.documents import open_given
from holdfast.errors import BadInputError
from holdfast.planning import as_slots
from holdfast.planning.arrays import FloatArray
from holdfast.planning.loads import as_token_counts
from holdfast.planning.survival.odds import as_rates

#: Characters of a bad cell that are shown.
_MOST_SHOWN = 40
#: Names of a first column that numbers the layers; pandas leaves that of its index empty.
_INDEX_NAMES = ("", "layer", "layers", "layer_id", "layer_idx", "index", "id")
#: With this many layers a first column of 0, 1, 2, ... numbers them.
_LEAST_INDEX = 3


def read_loads(path: Path, iteration: int | None) -> Any:
    """Return the tokens per layer and expert from .npz, .csv, .json, or a file that an engine wrote.

    Windows are added up, except in .npz. The values are not checked.

    Args:
        iteration: of an .npz recording; None if not given.

    Raises:
        BadInputError: the file cannot be read, or `iteration` is given for another format.
    """
    readers = {
        ".npz": lambda: read_recording(path, iteration),
        ".csv": lambda: _read_csv(path),
        ".json": lambda: _split_into_windows(_json("--loads", path), added_up=True),
        **dict.fromkeys(SUFFIXES, lambda: read_dump(path).sum(axis=0)),
    }
    if path.suffix not in readers:
        raise BadInputError(f"--loads {path}: the name must end in .npz, .csv, .json, {', '.join(SUFFIXES)}")
    if iteration is not None and path.suffix != ".npz":
        raise BadInputError(f"--iteration {iteration} is for .npz recordings only: leave it out for {path.name}")
    return readers[path.suffix]()


def read_windows(path: Path, iteration: int | None) -> FloatArray:
    """Return loads `(windows, L, E)`: all that a recording has, the one of this `iteration`, or the table of a file.

    A file without windows, and each .csv, is one window.

    Raises:
        BadInputError: the file cannot be read, or its values are not counts of tokens.
    """
    if iteration is not None or path.suffix in (".csv",):
        found = read_loads(path, iteration)
    elif path.suffix == ".npz":
        found = read_all(path)
    elif path.suffix == ".json":
        found = _split_into_windows(_json("--loads", path), added_up=False)
    else:
        found = read_dump(path) if path.suffix in SUFFIXES else read_loads(path, None)
    try:
        table = np.asarray(found, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadInputError(f"--loads {path}: not a table of numbers with one row per layer ({error})") from None
    windows = table if table.ndim == 3 else table[None]
    return np.stack([as_token_counts(window).astype(np.float64) for window in windows])


def _split_into_windows(document: Any, *, added_up: bool) -> Any:
    """Return the loads in a JSON document: the value of `logical_count`, or the whole document.

    With `added_up`, a table of three axes is summed over its windows. Values are checked later.
    """
    if not isinstance(document, dict):
        return document
    found = cast(dict[str, Any], document).get("logical_count", document)
    if not added_up or not isinstance(found, list):
        return found
    try:
        table = np.asarray(found, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        return cast(Any, found)  # The planning reports the error.
    return table.sum(axis=0) if table.ndim == 3 else table


def _read_csv(path: Path) -> list[list[float]]:
    """Read the tokens of one layer per line. Blank lines are skipped; a first line without any number is a header.

    Raises:
        BadInputError: a cell is not a number, lines differ in length, the first column numbers the layers, or no layer
            is there.
    """
    text = _text("--loads", path)
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        raise BadInputError(f"{path}, line {line}: holds a NUL byte; give plain text, one line of tokens per layer")
    rows = csv.reader(text.splitlines(keepends=True))
    layers: list[list[float]] = []
    may_be_header, names_experts = True, False
    try:
        for row in rows:
            if not any(cell.strip() for cell in row):
                continue
            if may_be_header and all(_number(cell) is None for cell in row):
                may_be_header = False
                names_experts = row[0].strip().lower() not in _INDEX_NAMES
                if not names_experts:
                    raise BadInputError(_index_column(path, rows.line_num, row[0].strip()))
                continue
            may_be_header = False
            layers.append([_tokens(cell, path, rows.line_num, column) for column, cell in enumerate(row, start=1)])
            if len(layers[-1]) != len(layers[0]):
                wrong = f"{len(layers[-1])} experts where the first layer has {len(layers[0])}"
                raise BadInputError(f"{path}, line {rows.line_num}: {wrong}; every layer needs as many")
    except csv.Error as error:
        raise BadInputError(f"{path}, line {rows.line_num}: not CSV ({error})") from None
    first = [layer[0] for layer in layers]
    if not names_experts and len(first) >= _LEAST_INDEX and first in _counts(len(first)):
        raise BadInputError(_index_column(path, 1, ""))
    if not layers:
        raise BadInputError(f"{path}: holds no layer; give one line of tokens per layer")
    return layers


def _counts(layers: int) -> tuple[list[float], list[float]]:
    """Return the numbers of the layers, from 0 and from 1."""
    return [float(layer) for layer in range(layers)], [float(layer) for layer in range(1, layers + 1)]


def _index_column(path: Path, line: int, name: str) -> str:
    called = f" {_short(name)}" if name else ""
    return (
        f"{path}, line {line}: column 1{called} numbers the layers, and every column must be an expert: "
        "leave it out (pandas: to_csv(index=False)), or name the experts in a first line"
    )


def _number(cell: str) -> float | None:
    """Return a number, or None if the text is not one."""
    try:
        return float(cell)
    except ValueError:
        return None


def _tokens(cell: str, path: Path, line: int, column: int) -> float:
    """Return the number in one cell.

    Raises:
        BadInputError: it is not a number; the message has the file, line and column.
    """
    number = _number(cell)
    if number is None:
        raise BadInputError(f"{path}, line {line}, column {column}: {_short(cell)} is not a number of tokens")
    return number


def _short(text: str) -> str:
    return repr(text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "...")


def _text(option: str, path: Path) -> str:
    """Return the content of a text file without the byte order mark that some programs put first.

    Raises:
        BadInputError: the file cannot be read, or is not UTF-8; the message names the option.
    """
    try:
        with io.TextIOWrapper(open_given(path), encoding="utf-8-sig") as file:
            return file.read()
    except OSError as error:
        raise BadInputError(f"{option} {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise BadInputError(f"{option} {path}: not text in UTF-8 ({error})") from None


def _json(option: str, path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        BadInputError: the file cannot be read or is not JSON; the message names the line or the option.
    """
    try:
        return json.loads(_text(option, path))
    except json.JSONDecodeError as error:
        raise BadInputError(f"{path}, line {error.lineno}: not JSON ({error.msg})") from None
    except RecursionError:
        raise BadInputError(f"{option} {path}: lists in lists, too deep to read; one list per layer will do") from None
    except BadInputError:
        raise
    except ValueError:  # Python refuses to read such a number
        raise BadInputError(f"{option} {path}: holds a number with thousands of digits; give token counts") from None


def read_racks(path: Path, nodes: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Read the rack of each node, in node order: a JSON list of names, or one name per line.

    Return them numbered 0, 1, ...

    Raises:
        BadInputError: the file is not such a list, or has another length than `nodes`.
    """
    given = _json("--racks", path) if path.suffix == ".json" else _text("--racks", path).split("\n")
    listed = cast(list[object], given) if isinstance(given, list) else [None]
    if not all(isinstance(name, str | int) for name in listed):
        raise BadInputError(f"--racks {path}: must hold a list of rack names, one per node")
    names = [str(name).strip() for name in listed if str(name).strip()]
    if len(names) != nodes:
        raise BadInputError(f"--racks {path}: names {len(names)} racks for {nodes} nodes; give one per node, in order")
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.array([numbers[name] for name in names])


def read_rates(path: Path, nodes: int) -> FloatArray | None:
    """Return how often each node fails, relative to the mean of all `nodes`, in node order; None if all fail alike.

    The file has a JSON list of numbers, or numbers separated by spaces or lines.

    Raises:
        BadInputError: the file has something else, another count than `nodes`, or rates that are not above 0 or too far
            apart.
    """
    document = _json("--failure-rates", path) if path.suffix == ".json" else None
    given = document if document is not None else _text("--failure-rates", path).split()
    listed = cast(list[object], given) if isinstance(given, list) else []
    numbers = [_number(str(value)) for value in listed]
    if None in numbers or not numbers:
        raise BadInputError(f"--failure-rates {path}: must hold a list of numbers, one per node")
    if len(numbers) != nodes:
        raise BadInputError(
            f"--failure-rates {path}: gives {len(numbers)} rates for {nodes} nodes; give one per node, in order"
        )
    return as_rates(np.array(numbers, dtype=np.float64), nodes)


def parse_slots(text: str, nodes: int | None) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the slots of each node `(nodes,)` from one number for all `nodes`, or a list such as `6,6,4`.

    Raises:
        BadInputError: it is not that, or one number is given without `nodes`.
    """
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise BadInputError(
            f"--expert-slots is {_short(text)}: give a number, or one per node such as 6,6,4,8"
        ) from None
    if nodes is None and len(numbers) == 1:
        raise BadInputError("--nodes is missing: give the number of nodes, or --expert-slots for each node")
    return as_slots(numbers, nodes)


def parse_weights(text: str) -> dict[int, float]:
    """Return the shares of the numbers of lost nodes from `1:0.7,2:0.2,4:0.1`.

    Raises:
        BadInputError: a part is not `LOST:SHARE`, or a number occurs twice.
    """
    shares: dict[int, float] = {}
    for part in text.split(","):
        lost, colon, share = part.partition(":")
        try:
            key, value = int(lost), float(share)
        except ValueError:
            colon, key, value = "", 0, 0.0
        if not colon or key in shares:
            raise BadInputError(
                f"--failure-weights: {part!r} is not a new LOST:SHARE pair; write for example 1:0.7,2:0.3"
            )
        shares[key] = value
    return shares
