"""Reads recorded loads from .npz: `tokens[iteration, layer, expert]` and `iterations`."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.documents import open_given
from holdfast.errors import BadInputError

_Table = np.ndarray[Any, Any]


def read_recording(path: Path, iteration: int | None) -> _Table:
    """Return the tokens `[layer, expert]` of one `iteration`, which may be None if the file has only one.

    Raises:
        BadInputError: the file cannot be read, has other shapes, or the iteration is missing or not recorded.
    """
    arrays = _read(path)
    tokens, iterations = arrays["tokens"], arrays.get("iterations", np.zeros(0, dtype=np.int64))
    for name, array in (("tokens", tokens), ("iterations", iterations)):
        if array.dtype.kind not in "iuf":
            raise BadInputError(f"--loads {path}: {name} hold {array.dtype}: they must be numbers")
    if tokens.ndim == 2 and iteration is None:
        return tokens
    if tokens.ndim != 3 or iterations.shape != tokens.shape[:1] or not tokens.size:
        raise BadInputError(
            f"--loads {path}: tokens have shape {tokens.shape} with {iterations.size} iterations: "
            "they must be [iteration, layer, expert], with one value in iterations for each"
        )
    if iteration is None and iterations.size == 1:
        return tokens[0]
    known = iterations.tolist()
    if iteration not in known:
        given = "is missing" if iteration is None else f"{iteration} is not recorded"
        few = ", ".join(str(value) for value in known[:3])
        raise BadInputError(f"--iteration {given}: choose one of {few}, ..., {known[-1]} ({len(known)} values)")
    return tokens[known.index(iteration)]


def read_all(path: Path) -> _Table:
    """Return the tokens `[iteration, layer, expert]` of all iterations. A table without iterations counts as one.

    Raises:
        BadInputError: the file cannot be read, or its tokens are not such a table of numbers.
    """
    tokens = _read(path)["tokens"]
    if tokens.dtype.kind not in "iuf" or tokens.ndim not in (2, 3) or not tokens.size:
        raise BadInputError(
            f"--loads {path}: tokens have shape {tokens.shape} of {tokens.dtype}: save [iteration, layer, expert]"
        )
    return tokens if tokens.ndim == 3 else tokens[None]


def _read(path: Path) -> dict[str, _Table]:
    """Return the arrays `tokens` and, if present, `iterations` of an .npz file.

    Raises:
        BadInputError: the file cannot be read, is not such a file, or lacks `tokens`.
    """
    try:
        with open_given(path) as file:
            # Looked at first: np.load takes single arrays and pickles too, whatever the name.
            if not zipfile.is_zipfile(file):
                raise BadInputError(f"--loads {path}: not a .npz file; save it with numpy.savez")
            file.seek(0)
            with np.load(file, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in ("tokens", "iterations") if name in archive}
    except OSError as error:
        raise BadInputError(f"--loads {path}: cannot be read ({error.strerror or error})") from None
    except MemoryError:
        raise BadInputError(f"--loads {path}: its arrays do not fit into memory") from None
    except BadInputError:
        raise
    except (ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadInputError(f"--loads {path}: not a .npz file of numbers ({reason})") from None
    if "tokens" not in arrays:
        raise BadInputError(f"--loads {path}: holds no array named tokens: save tokens[iteration, layer, expert]")
    return arrays
