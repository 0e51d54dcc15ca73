"""A coordinator with its settings as the argument; it prints its address."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path

import msgspec

from holdfast.control.coordinator.server import ServerSettings, serve
from holdfast.control.registry import JobEntry
from holdfast.coordination.config import CoordinatorConfig
from holdfast.errors import HoldfastError
from holdfast.protocol.job_spec import JobSpec


def ready(entry: JobEntry) -> None:
    print(msgspec.json.encode(entry).decode(), flush=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    given = json.loads(sys.argv[1])
    config = CoordinatorConfig(spec=msgspec.convert(given.pop("spec"), JobSpec), **given.pop("config"))
    paths = {key: Path(given.pop(key)) for key in ("registry", "tls_cert", "tls_key") if key in given}
    try:
        sys.exit(asyncio.run(serve(ServerSettings(config=config, **paths, **given), on_ready=ready)))
    except HoldfastError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
