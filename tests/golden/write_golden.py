"""Writes what `test_golden.py` reads: `python tests/golden/write_golden.py NEW_KIND...`.

Without arguments it adds the kinds that are missing. What is there stays, because files of earlier versions must remain
readable. A kind is replaced only if it is named, which breaks jobs that run while holdfast is upgraded.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
from formats import LINES, MESSAGES, examples_of

FOLDER = Path(__file__).parent


def main(replaced: set[str]) -> None:
    for file, formats in (("messages.json", MESSAGES), ("lines.json", LINES)):
        path = FOLDER / file
        known: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
        for name, format_type in formats.items():
            kinds = known.setdefault(name, {})
            for kind, value in examples_of(format_type):
                if kind not in kinds or kind.split()[0] in replaced:
                    kinds[kind] = written(value, binary=formats is MESSAGES)
        path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def written(value: msgspec.Struct, *, binary: bool) -> dict[str, Any]:
    """Return the bytes of a value as text, and its fields."""
    data = msgspec.msgpack.encode(value).hex() if binary else msgspec.json.encode(value).decode()
    return {"bytes" if binary else "line": data, "fields": msgspec.to_builtins(value)}


if __name__ == "__main__":
    main(set(sys.argv[1:]))
