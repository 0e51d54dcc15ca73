"""The jobs that run on this machine: one private file each, so that commands find theirs without being told where."""

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

#: for so long an address is waited for whose token is not given
_CONNECT_S = 5.0


class JobEntry(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach one job, or a pool (`pool`: its name).

    `tls_ca`: the certificate to trust, "" for the system's. `birth`: tells pids apart.
    """

    url: str
    token: str
    job: str
    pid: int
    tls_ca: str = ""
    birth: str = ""
    pool: str = ""


def registry_directory(environment: Mapping[str, str]) -> Path:
    """Return the default directory: in the session's runtime directory if that can be written, else below /tmp."""
    session = environment.get("XDG_RUNTIME_DIR", "")
    usable = bool(session) and os.path.isdir(session) and os.access(session, os.W_OK | os.X_OK)
    return Path(session, "holdfast") if usable else Path(f"/tmp/holdfast-{os.getuid()}")


def register(directory: Path, entry: JobEntry) -> Path:
    """Write the file of a job, all of it at once; return its path, for `unregister`.

    Raises:
        BadInputError: the directory cannot be made, or is not ours alone.
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
            f"the registry {directory} cannot be written: {error.strerror}: set XDG_RUNTIME_DIR to a folder of yours"
        ) from None
    return path


def unregister(path: Path) -> None:
    """Remove the file of a job; one that is gone already is no error."""
    path.unlink(missing_ok=True)


def live_jobs(directory: Path) -> list[JobEntry]:
    """Return the jobs whose coordinator lives, ordered by URL; the files of dead ones are removed.

    Raises:
        BadInputError: the directory is not ours alone: somebody else could have written it.
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
    """Return the pool at an address, else the only one of this machine; None where there is none.

    Of an address that is not registered here nobody knows yet what is there.

    Raises:
        BadInputError: there are several, or no token for the address, or one that cannot be sent.
    """
    if address is not None:
        return find_job(directory, address, token, tls_ca=tls_ca)
    pools = [entry for entry in live_jobs(directory) if entry.pool]
    if len(pools) > 1:
        urls = ", ".join(f"{entry.url} ({entry.pool})" for entry in pools)
        raise BadInputError(f"{len(pools)} pools run on this machine: choose one with --address: {urls}")
    return pools[0] if pools else None


def check_token(token: str) -> None:
    """Refuse a token that no request can carry.

    Raises:
        BadInputError: it is empty, or has other characters than ASCII's printable ones.
    """
    if not token or not token.isascii() or not token.isprintable():
        raise BadInputError("the token must be one or more printable ASCII characters")


def check_name(what: str, name: str) -> None:
    """Refuse the name of a job or node that no message can carry.

    Raises:
        BadInputError: naming `what` it is.
    """
    if not re.fullmatch(NAME_PATTERN, name) or name.endswith("\n"):
        raise BadInputError(f"{what} is {name!r}: use letters, digits, dots, dashes, at most 64")


def find_job(
    directory: Path, address: str | None = None, token: str | None = None, *, tls_ca: str = "", job: str | None = None
) -> JobEntry:
    """Return the job at an address, else the only one of this name (or at all) that runs on this machine.

    Args:
        token, tls_ca: for an address that is not registered here; what is there then need not be this job.

    Raises:
        BadInputError: there are several, or no token for the address, or one that cannot be sent.
        UnreachableError: there is none, or nobody answers at an address without a token.
    """
    jobs = [entry for entry in live_jobs(directory) if not entry.pool or address is not None]
    if address is not None:
        url = address.rstrip("/")
        known = next((entry for entry in jobs if entry.url == url), None)
        if known is None or token is not None:
            return _elsewhere(url, token, tls_ca)
        if job is not None and known.job != job:
            raise UnreachableError(f"there is no job {job!r} at {url}: the one there is {known.job!r}")
        return known
    if not jobs:
        raise UnreachableError("no job runs on this machine: start one with `holdfast run`, or give --address URL")
    found = [entry for entry in jobs if job is None or entry.job == job]
    if not found:
        names = ", ".join(sorted({entry.job for entry in jobs}))
        raise UnreachableError(f"there is no job {job!r} on this machine: those that run are {names}")
    if len(found) > 1:
        urls = ", ".join(f"{entry.url} ({entry.job})" for entry in found)
        raise BadInputError(f"{len(found)} jobs run on this machine: choose one with --job or --address: {urls}")
    return found[0]


def _elsewhere(url: str, token: str | None, tls_ca: str) -> JobEntry:
    if token is None:
        if _is_silent(url):
            raise UnreachableError(f"no coordinator answers at {url}; where one does, give its token, too ({TOKEN})")
        raise BadInputError(f"the job at {url} does not run on this machine: give its token in {TOKEN} or --token-file")
    check_token(token)
    return JobEntry(url=url, token=token, job="", pid=0, tls_ca=tls_ca)


def _is_silent(url: str) -> bool:
    """Tell whether nobody listens at an address; of one that is none that is not said."""
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
    """Tokens lie here: nobody else may read them, or put others in their place."""
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise BadInputError(
            f"the registry {directory} is not a directory of yours alone (mode 0700): remove it, or "
            "set XDG_RUNTIME_DIR to a folder of yours"
        )


def _birth(pid: int) -> str | None:
    """Return what tells a live process from an earlier one of the same number; None where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None if Path("/proc/self").exists() else _birth_without_proc(pid)
    state, *fields = text.rpartition(")")[2].split()
    return None if state in "ZX" else fields[18]


def _birth_without_proc(pid: int) -> str | None:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return ""
