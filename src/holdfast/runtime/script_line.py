"""Finds lines and names in the user's script, for error messages."""

from __future__ import annotations

import inspect
import linecache
import re
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

#: torch, and this package
_NOT_THE_SCRIPT = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[1]}/")
_STANDARD_LIBRARY = f"{Path(linecache.__file__ or '').parent}/"


def find_script_line() -> str:
    """Return the line of the script that is being executed in this thread, as `file:line`; "" if there are only frames
    of libraries.
    """
    frame = next(_script_frames(), None)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def find_variable_name(thing: object) -> str:
    """Return the name of a local or global variable that holds this object in a frame of the script, innermost first;
    "" if none does.
    """
    for frame in _script_frames():
        for variables in (frame.f_locals, frame.f_globals):
            for name, value in variables.items():
                if value is thing:
                    return name
    return ""


def find_call_line(name: str, method: str) -> str:
    """Search the files of the script's present frames for the first line that calls `name.method(`, outside of
    comments. Return it as `file:line`, or "".
    """
    call = re.compile(rf"\b{re.escape(name)}\s*\.\s*{re.escape(method)}\s*\(")
    for file in dict.fromkeys(frame.f_code.co_filename for frame in _script_frames()) if name else ():
        for number, line in enumerate(linecache.getlines(file), 1):
            if call.search(line.split("#", 1)[0]):
                return f"{file}:{number}"
    return ""


def _script_frames() -> Iterator[FrameType]:
    """Yield this thread's frames outside of torch, holdfast and the standard library, innermost first."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        file = frame.f_code.co_filename
        library = file.startswith(_NOT_THE_SCRIPT) or (
            file.startswith(_STANDARD_LIBRARY) and "site-packages" not in file
        )
        if not library and not file.startswith("<"):
            yield frame
        frame = frame.f_back
