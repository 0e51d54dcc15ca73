"""Which job is meant, and how to reach it: the options of all commands that speak with a coordinator."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from holdfast import environment as env
from holdfast.cli.options import CONNECTION
from holdfast.control.client import CoordinatorClient
from holdfast.control.registry import JobEntry, find_job, registry_directory
from holdfast.errors import BadInputError, UnreachableError

#: bytes of a token's file that are read
_MOST_TOKEN = 4096

TokenFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Read the job's secret from this file.",
        show_default=f"{env.TOKEN}, else the file in {env.TOKEN_FILE}",
        rich_help_panel=CONNECTION,
    ),
]


@dataclass(frozen=True, kw_only=True)
class Server:
    """Which job is meant, and how its coordinator is reached."""

    address: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar=env.ADDRESS,
            help="The coordinator's URL.",
            show_default="this machine's job",
            rich_help_panel=CONNECTION,
        ),
    ] = None
    job: Annotated[
        str | None,
        typer.Option(
            "--job",
            "-j",
            metavar="NAME",
            envvar=env.JOB,
            help="The job's name, where several run.",
            rich_help_panel=CONNECTION,
        ),
    ] = None
    token_file: TokenFile = None
    tls_ca: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            envvar=env.TLS_CA,
            help="Certificates to trust.",
            show_default="the system's",
            rich_help_panel=CONNECTION,
        ),
    ] = ""

    def entry(self) -> JobEntry:
        """Return how to reach the job.

        Raises:
            BadInputError: it is not clear which one is meant, or its token is not known.
            UnreachableError: there is none.
        """
        directory = registry_directory(os.environ)
        return find_job(directory, self.address, read_token(self.token_file), tls_ca=self.tls_ca, job=self.job)

    def client(self) -> CoordinatorClient:
        """Return a way to the job's coordinator.

        Raises:
            BadInputError, UnreachableError: as `entry`, or another job runs at the address.
        """
        entry = self.entry()
        client = CoordinatorClient(entry)
        if self.job and not entry.job:
            self.check_job(client.status()["job"])
        return client

    def check_job(self, found: str) -> None:
        """Refuse a job that is not the one that the user has named.

        Raises:
            UnreachableError: it is another one.
        """
        if self.job and found != self.job:
            raise UnreachableError(f"there is no job {self.job!r} at {self.address}: the one there is {found!r}")


def read_token(file: Path | None) -> str | None:
    """Return the secret that an option or a variable gives; None for none.

    Raises:
        BadInputError: the file cannot be read, or holds no token.
    """
    token, named = os.environ.get(env.TOKEN), os.environ.get(env.TOKEN_FILE)
    if file is None and token:
        return token
    path = file or (Path(named) if named else None)
    if path is None:
        return None
    try:
        with path.open("rb") as stream:
            text = stream.read(_MOST_TOKEN + 1).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"the token file {path} cannot be read: {getattr(error, 'strerror', error)}") from None
    if not text or len(text) > _MOST_TOKEN:
        raise BadInputError(f"the token file {path} holds {len(text)} characters: give 1 to {_MOST_TOKEN}")
    return text
