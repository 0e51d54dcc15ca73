"""What `holdfast place` reads: loads, racks, slots and weights; everything wrong is named with its place."""

from __future__ import annotations

import csv
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.errors import BadInputError
from holdfast.planning import as_slots


def read_loads(path: Path, iteration: int | None) -> list[list[float]] | np.ndarray[Any, Any]:
    """Read tokens per layer and expert from .npz (with *iteration*), .csv or .json; planning checks the values."""
    readers = {
        ".npz": lambda: _read_npz(path, iteration),
        ".csv": lambda: _read_csv(path),
        ".json": lambda: _json(path),
    }
    if path.suffix not in readers:
        raise BadInputError(f"--loads {path}: the name must end in .npz, .csv or .json")
    if iteration is not None and path.suffix != ".npz":
        raise BadInputError(f"--iteration {iteration} is for .npz recordings only: leave it out for {path.name}")
    try:
        return readers[path.suffix]()
    except OSError as error:
        raise BadInputError(f"--loads {path}: cannot be read ({error.strerror})") from None
    except (zipfile.BadZipFile, UnicodeDecodeError) as error:
        raise BadInputError(f"--loads {path}: not a {path.suffix} file ({error})") from None


def _read_npz(path: Path, iteration: int | None) -> np.ndarray[Any, Any]:
    try:
        # NumPy leaves a file it opened itself open where that is no archive.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            tokens = archive["tokens"]
            iterations = [int(value) for value in archive["iterations"]] if "iterations" in archive else []
    except (KeyError, ValueError) as error:
        raise BadInputError(f"--loads {path}: needs numbers named tokens[iteration, layer, expert] ({error})") from None
    if tokens.ndim == 2 and iteration is None:
        return tokens
    if tokens.ndim != 3 or len(iterations) != len(tokens):
        raise BadInputError(
            f"--loads {path}: tokens have shape {tokens.shape} with {len(iterations)} iterations: "
            "they must be [iteration, layer, expert], with one value in iterations for each"
        )
    if iteration is None and len(iterations) == 1:
        return tokens[0]
    if iteration not in iterations:
        given = "is missing" if iteration is None else f"{iteration} is not recorded"
        few = ", ".join(str(value) for value in iterations[:3])
        raise BadInputError(
            f"--iteration {given}: choose one of {few}, ..., {iterations[-1]} ({len(iterations)} values)"
        )
    return tokens[iterations.index(iteration)]


def _read_csv(path: Path) -> list[list[float]]:
    """Read one line per layer; a first line without any number is a header."""
    layers: list[list[float]] = []
    with path.open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.reader(file), start=1):
            if not any(cell.strip() for cell in row):
                continue
            try:
                layers.append([float(cell) for cell in row])
            except ValueError as error:
                if number > 1:
                    raise BadInputError(f"{path}, line {number}: {error}; give tokens per expert") from None
                continue
            if len(layers[-1]) != len(layers[0]):
                wrong = f"{len(layers[-1])} experts where the first layer has {len(layers[0])}"
                raise BadInputError(f"{path}, line {number}: {wrong}; every layer needs as many")
    if not layers:
        raise BadInputError(f"{path}: holds no layer; give one line of tokens per layer")
    return layers


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise BadInputError(f"{path}, line {error.lineno}: not JSON ({error.msg})") from None


def read_racks(path: Path, nodes: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Read the rack of each node, in node order: a JSON list of names, or one name per line; numbered 0, 1, ..."""
    try:
        names = _json(path) if path.suffix == ".json" else path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise BadInputError(f"--racks {path}: cannot be read ({error.strerror})") from None
    if not isinstance(names, list):
        raise BadInputError(f"--racks {path}: must hold a list of rack names, one per node")
    names = [str(name).strip() for name in names if str(name).strip()]
    if len(names) != nodes:
        raise BadInputError(f"--racks {path}: names {len(names)} racks for {nodes} nodes; give one per node, in order")
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.array([numbers[name] for name in names])


def parse_slots(text: str, nodes: int | None) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Read slots per node: one number for all *nodes*, or one each."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise BadInputError(f"--slots is {text!r}: give a number, or one per node such as 6,6,4,8") from None
    if nodes is None and len(numbers) == 1:
        raise BadInputError("--nodes is missing: give the number of nodes, or --slots for each node")
    return as_slots(numbers, nodes)


def parse_weights(text: str) -> dict[int, float]:
    """Read shares of the numbers of lost nodes: `1:0.7,2:0.2,4:0.1`."""
    shares: dict[int, float] = {}
    for part in text.split(","):
        lost, colon, share = part.partition(":")
        try:
            key, value = int(lost), float(share)
        except ValueError:
            colon, key, value = "", 0, 0.0
        if not colon or key in shares:
            raise BadInputError(
                f"--failure-weights: {part!r} is no new LOST:SHARE pair; write for instance 1:0.7,2:0.3"
            )
        shares[key] = value
    return shares
