"""The jobs that run on this machine, one private file for each, so that commands find them without an address."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from holdfast.environment import TOKEN
from holdfast.errors import BadInputError, UnreachableError
from holdfast.protocol.names import NAME_PATTERN

#: seconds to wait for a connection to an address without a token
_CONNECT_S = 5.0


class JobEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The address and token of one job or pool."""

    url: str
    token: str
    job: str
    pid: int
    #: path of the certificate to trust, or "" for the system's
    tls_ca: str = ""
    #: start time of the process, to detect a reused pid
    birth: str = ""
    #: name of the pool, or "" for a job
    pool: str = ""


def registry_directory(environment: Mapping[str, str]) -> Path:
    """Return the default registry: in the session's runtime directory if it is writable, else below /tmp."""
    session = environment.get("XDG_RUNTIME_DIR", "")
    usable = bool(session) and os.path.isdir(session) and os.access(session, os.W_OK | os.X_OK)
    return Path(session, "holdfast") if usable else Path(f"/tmp/holdfast-{os.getuid()}")


def register(directory: Path, entry: JobEntry) -> Path:
    """Write the file of a job or pool atomically, and return its path, for `unregister`.

    The directory is created if necessary. `birth` of the entry is replaced by the start time of its process.

    Raises:
        BadInputError: the directory cannot be created or written, or other users can access it.
    """
    entry = msgspec.structs.replace(entry, birth=_birth(entry.pid) or "")
    path = directory / f"{entry.pid}.json"
    draft = directory / f".{entry.pid}.new"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(directory)
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(msgspec.json.encode(entry))
        draft.replace(path)
    except OSError as error:
        raise BadInputError(
            f"the registry {directory} cannot be written: {error.strerror}: set XDG_RUNTIME_DIR to a folder of your own"
        ) from None
    return path


def unregister(path: Path) -> None:
    """Remove the file of a job. A missing file is ignored."""
    path.unlink(missing_ok=True)


def live_jobs(directory: Path) -> list[JobEntry]:
    """Return the jobs and pools whose servers live, ordered by URL, or [] without a directory.

    Files of ended servers are removed; files that cannot be read are skipped.

    Raises:
        BadInputError: other users can access the directory, so its content cannot be trusted.
    """
    if not directory.is_dir():
        return []
    _check_private(directory)
    found: list[JobEntry] = []
    for path in sorted(directory.glob("*.json")):
        try:
            entry = msgspec.json.decode(path.read_bytes(), type=JobEntry)
        except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
            continue
        birth = _birth(entry.pid)
        if birth is not None and birth == entry.birth:
            found.append(entry)
        else:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
    return sorted(found, key=lambda entry: entry.url)


def find_pool(directory: Path, address: str | None, token: str | None, *, tls_ca: str = "") -> JobEntry | None:
    """Return the pool at an address, else the only one on this machine, or None without one.

    An address that is not registered here may also belong to a job.

    Raises:
        BadInputError: there are several, or the token of the address is missing or invalid.
    """
    if address is not None:
        return find_job(directory, address, token, tls_ca=tls_ca)
    pools = [entry for entry in live_jobs(directory) if entry.pool]
    if len(pools) > 1:
        urls = ", ".join(f"{entry.url} ({entry.pool})" for entry in pools)
        raise BadInputError(f"{len(pools)} pools run on this machine: choose one with --address: {urls}")
    return pools[0] if pools else None


def check_token(token: str) -> None:
    """Check that a request can carry a token.

    Raises:
        BadInputError: it is empty, or contains other characters than printable ASCII.
    """
    if not token or not token.isascii() or not token.isprintable():
        raise BadInputError("the token must be one or more printable ASCII characters")


def check_name(what: str, name: str) -> None:
    """Check that messages can carry the name of a job or node.

    Raises:
        BadInputError: it is invalid. The message begins with `what`.
    """
    if not re.fullmatch(NAME_PATTERN, name) or name.endswith("\n"):
        raise BadInputError(f"{what} is {name!r}: use letters, digits, dots, dashes, at most 64")


def find_job(
    directory: Path, address: str | None = None, token: str | None = None, *, tls_ca: str = "", job: str | None = None
) -> JobEntry:
    """Return the job at an address, else the only one with this name, or the only one at all, on this machine.

    For an address that is not registered here, or with a token, the entry consists of the arguments, without a name. A
    pool is only found by its address.

    Args:
        directory: the registry.
        address: URL of the job, or None.
        token: token for an address that is not registered here.
        tls_ca: certificate for such an address.
        job: name of the job, or None. It is not checked at such an address.

    Raises:
        BadInputError: there are several, or the token of the address is missing or invalid.
        UnreachableError: there is none, it has another name, or no server answers at an address without a token.
    """
    jobs = [entry for entry in live_jobs(directory) if not entry.pool or address is not None]
    if address is not None:
        url = address.rstrip("/")
        known = next((entry for entry in jobs if entry.url == url), None)
        if known is None or token is not None:
            return _unregistered_job(url, token, tls_ca)
        if job is not None and known.job != job:
            raise UnreachableError(f"there is no job {job!r} at {url}: the one there is {known.job!r}")
        return known
    if not jobs:
        raise UnreachableError("no job runs on this machine: start one with `holdfast run`, or give --address URL")
    found = [entry for entry in jobs if job is None or entry.job == job]
    if not found:
        names = ", ".join(sorted({entry.job for entry in jobs}))
        raise UnreachableError(f"there is no job {job!r} on this machine: the running jobs are {names}")
    if len(found) > 1:
        urls = ", ".join(f"{entry.url} ({entry.job})" for entry in found)
        raise BadInputError(f"{len(found)} jobs run on this machine: choose one with --job or --address: {urls}")
    return found[0]


def _unregistered_job(url: str, token: str | None, tls_ca: str) -> JobEntry:
    """Return an entry without a name for an address and its token. No server is contacted if there is a token.

    Raises:
        BadInputError: the token is missing or invalid.
        UnreachableError: the token is missing, and no server listens at the address.
    """
    if token is None:
        if _is_unreachable(url):
            raise UnreachableError(f"no coordinator answers at {url}: check the address, and give its token ({TOKEN})")
        raise BadInputError(f"the job at {url} does not run on this machine: give its token in {TOKEN} or --token-file")
    check_token(token)
    return JobEntry(url=url, token=token, job="", pid=0, tls_ca=tls_ca)


def _is_unreachable(url: str) -> bool:
    """Return whether a connection to an address fails. False if the URL is invalid or has no port."""
    try:
        parts = urlsplit(url)
        place = parts.hostname, parts.port
    except ValueError:
        return False
    if not place[0] or place[1] is None:
        return False
    try:
        socket.create_connection(place, timeout=_CONNECT_S).close()
    except (OSError, UnicodeError):
        return True
    return False


def _check_private(directory: Path) -> None:
    """Check that only this user can access the registry, because it contains tokens.

    Raises:
        BadInputError: other users can.
    """
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise BadInputError(
            f"the registry {directory} must be a directory of this user with mode 0700: remove it, or "
            "set XDG_RUNTIME_DIR to a folder of your own"
        )


def _birth(pid: int) -> str | None:
    """Return the start time of a live process, which detects a reused pid, or None if it has ended (or is a zombie).

    On a system without /proc, return "" for a live process.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None if Path("/proc/self").exists() else _birth_without_proc(pid)
    state, *fields = text.rpartition(")")[2].split()
    return None if state in "ZX" else fields[18]


def _birth_without_proc(pid: int) -> str | None:
    """Return "" if a process lives, also one of another user, else None."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return ""
