"""Options that choose a job or a pool, and how to connect to it. All commands that talk to a coordinator have them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from holdfast import environment as env
from holdfast.cli.options import CONNECTION
from holdfast.control.client import CoordinatorClient, check_url
from holdfast.control.pool_client import PoolClient
from holdfast.control.registry import JobEntry, find_job, find_pool, live_jobs, registry_directory
from holdfast.errors import BadInputError, HoldfastError, UnreachableError

#: bytes of a token's file that are read
_MOST_TOKEN = 4096

TokenFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="File with the job's secret.",
        show_default=f"{env.TOKEN}, else the file in {env.TOKEN_FILE}",
        rich_help_panel=CONNECTION,
    ),
]


@dataclass(frozen=True, kw_only=True)
class Server:
    """The chosen job, and how to connect to its coordinator."""

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
            help="The job's name, if several jobs run.",
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
        """Return the address and the secret of the job's coordinator.

        For a job of a pool, it is a path below the pool's URL.

        Raises:
            BadInputError: several jobs match, the token is not known, or a pool is there and no job of it is named.
            UnreachableError: no job matches.
        """
        self._check_address()
        directory, token = registry_directory(os.environ), read_token(self.token_file)
        if self.job and (pool := self._find_pool_with(self.job)) is not None:
            return msgspec.structs.replace(pool, url=f"{pool.url.rstrip('/')}/jobs/{self.job}/job", job=self.job)
        if not self.job and self.address is None and (pool := _find_only_pool(directory)) is not None:
            with PoolClient(pool) as client:
                jobs = ", ".join(sorted(one["job"] for one in client.status()["jobs"])) or "none yet"
            raise BadInputError(
                f"a pool ({pool.pool!r}) runs on this machine: name one of its jobs with -j NAME; its jobs: {jobs}"
            )
        found = find_job(directory, self.address, token, tls_ca=self.tls_ca, job=self.job)
        if found.pool:
            raise BadInputError(f"a pool ({found.pool!r}) is at {found.url}: name one of its jobs with -j NAME")
        return found

    def pool(self) -> PoolClient:
        """Return a client of the pool at the given address, or else of the only one on this machine.

        Raises:
            BadInputError: several pools run on this machine, the token is missing or invalid, or the address has a job
                without a pool.
            UnreachableError: no pool runs on this machine.
        """
        entry = self._pool_entry()
        if entry is None:
            raise UnreachableError("no pool runs on this machine: start one (holdfast pool), or give --address URL")
        if not entry.pool and (alone := _name_of_job_at(entry)):
            raise BadInputError(
                f"at {entry.url} is job {alone}, and no pool: give the --address of a pool (holdfast pool starts one), "
                "or leave it out for this machine's"
            )
        return PoolClient(entry)

    def find_pool_of_job(self) -> PoolClient | None:
        """Return a client of the pool that has the chosen job, or None if no pool has it."""
        entry = self._find_pool_with(self.job) if self.job else None
        return PoolClient(entry) if entry is not None else None

    def find_pool_of_nodes(self) -> PoolClient | None:
        """Return a client of the pool that has the nodes, or None if a job without a pool has them, or nothing runs.

        The pool is found by the chosen job, or else by the address; without both, this machine's, unless a job without
        a pool runs here, too.

        Raises:
            BadInputError: several pools run on this machine, or the token is missing or invalid.
            UnreachableError: the pool does not have the chosen job, or does not answer.
        """
        if self.job:
            return self.find_pool_of_job()
        alone = any(not one.pool for one in live_jobs(registry_directory(os.environ)))
        entry = self._pool_entry() if self.address or not alone else None
        if entry is None or entry.pool:
            return PoolClient(entry) if entry is not None else None
        try:
            with PoolClient(entry) as client:
                client.status()
        except UnreachableError:
            return None  # The coordinator of a job without a pool is there, or nothing.
        return PoolClient(entry)

    def _check_address(self) -> None:
        if self.address is not None:
            check_url("coordinator", self.address)

    def _pool_entry(self) -> JobEntry | None:
        """Return the entry of the given address, or else of the pool on this machine; None if there is no pool.

        It is not checked what is at the address: it may also be a job without a pool.

        Raises:
            BadInputError: several pools run on this machine, or the token of the address is missing or invalid.
        """
        self._check_address()
        token = read_token(self.token_file)
        return find_pool(registry_directory(os.environ), self.address, token, tls_ca=self.tls_ca)

    def _find_pool_with(self, job: str) -> JobEntry | None:
        """Return the pool if it has this job; None if the job runs without a pool, or no pool is found.

        Raises:
            UnreachableError: a pool is there, and has no such job or does not answer.
        """
        if self.address is None and any(one.job == job for one in live_jobs(registry_directory(os.environ))):
            return None  # It runs on this machine without a pool.
        entry = self._pool_entry()
        if entry is None or not (entry.pool or self.address):
            return None
        try:
            with PoolClient(entry) as client:
                found = client.status()
        except UnreachableError:
            if entry.pool:
                raise  # Its server may be restarting.
            return None  # The coordinator of a job without a pool is there, or nothing.
        jobs = [one["job"] for one in found["jobs"]]
        if job not in jobs:
            known = ", ".join(sorted(jobs)) or "none"
            raise UnreachableError(f"there is no job {job!r} in the pool ({found['pool']!r}): its jobs are {known}")
        return entry

    def client(self) -> CoordinatorClient:
        """Return a client of the job's coordinator. If only an address is known, ask it for the job's name.

        Raises:
            BadInputError: several jobs match, the token is not known, or a pool is there and no job of it is named.
            UnreachableError: no job matches, or another job runs at the address.
        """
        entry = self.entry()
        client = CoordinatorClient(entry)
        if self.job and not entry.job:
            self.check_job(client.status()["job"])
        return client

    def check_job(self, found: str) -> None:
        """Refuse a job whose name is not the one that the user gave.

        Raises:
            UnreachableError: it has another name.
        """
        if self.job and found != self.job:
            raise UnreachableError(f"there is no job {self.job!r} at {self.address}: the one there is {found!r}")


def _find_only_pool(directory: Path) -> JobEntry | None:
    """Return this machine's pool, or None if it has no pool, several pools, or a job without a pool."""
    entries = live_jobs(directory)
    return entries[0] if len(entries) == 1 and entries[0].pool else None


def _name_of_job_at(entry: JobEntry) -> str:
    """Return the name of the job without a pool at an address, or "" if a pool or nothing is there."""
    try:
        with CoordinatorClient(entry) as client:
            return entry.job or str(client.status()["job"])
    except HoldfastError:
        return ""  # The next request reports the error.


def read_token(file: Path | None) -> str | None:
    """Return the secret from the file, else from the environment (the token, or a file with it), or else None.

    Raises:
        BadInputError: the file cannot be read, or holds no token or a too long one.
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
