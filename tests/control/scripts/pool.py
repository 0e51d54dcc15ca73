"""A pool's server with its settings as the argument; it prints its address."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path

import msgspec

from holdfast.control.pool.pool_server import serve_pool
from holdfast.control.pool.settings import PoolSettings
from holdfast.control.registry import JobEntry
from holdfast.errors import HoldfastError


def ready(entry: JobEntry) -> None:
    print(msgspec.json.encode(entry).decode(), flush=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    given = json.loads(sys.argv[1])
    try:
        sys.exit(asyncio.run(serve_pool(PoolSettings(folder=Path(given.pop("folder")), **given), on_ready=ready)))
    except HoldfastError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
