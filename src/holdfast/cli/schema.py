"""`holdfast schema`: what files and lines look like, for editors and other programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import typer

from holdfast.cli.output import print_json
from holdfast.documents import schema_of
from holdfast.errors import BadInputError
from holdfast.protocol.events import AnyEvent
from holdfast.protocol.job_spec import JobSpec

_SCHEMAS: dict[str, Callable[[], dict[str, Any]]] = {
    "job": lambda: schema_of(JobSpec),
    "events": lambda: msgspec.json.schema(AnyEvent),
}


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("schema")(schema)


def schema(
    name: Annotated[str, typer.Argument(metavar="NAME", help="job (of job.toml), or events (of a line of them).")],
) -> None:
    """Print the JSON schema of a file."""
    if name not in _SCHEMAS:
        raise BadInputError(f"there is no schema {name!r}: choose one of {', '.join(_SCHEMAS)}")
    print_json(_SCHEMAS[name]())
