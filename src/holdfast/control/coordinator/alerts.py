"""Alerts: what needs a person is handed to the user's program or webhook. It may fail or hang; the job never waits.

One at a time, in order, each with a limit; nothing goes through a shell, and none of our secrets goes along.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import shutil
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import deque
from urllib.parse import urlsplit

import msgspec

from holdfast.environment import for_workers
from holdfast.errors import BadInputError
from holdfast.protocol.events import ActionRequested

#: how long one may take: a person is slower
LONGEST_S = 30.0
#: that wait for their turn; of more, the oldest go
MOST_WAITING = 64
#: of what a program complains, so much is logged
_MOST_SAID = 500

_log = logging.getLogger("holdfast.coordinator")


class AlertError(Exception):
    """An alert did not get through; the message says why."""


def is_webhook(alert: str) -> bool:
    """Tell whether an alert is sent somewhere; else it is a program and its arguments."""
    return alert.lower().startswith(("http://", "https://"))


def check_alert(option: str, alert: str) -> None:
    """Refuse what could never be run or sent to.

    Raises:
        BadInputError: naming the option or key, and the value.
    """
    if not alert:
        return
    if is_webhook(alert):
        with contextlib.suppress(ValueError):
            if urlsplit(alert).hostname and (urlsplit(alert).port or 1):
                return
        raise BadInputError(f"{option} is {alert!r}: it is no URL; write https://HOST/PATH, or a program")
    try:
        words = shlex.split(alert)
    except ValueError as error:
        raise BadInputError(f"{option} is {alert!r}: {error}; write a program and its arguments") from None
    if not words or "\0" in alert or shutil.which(words[0]) is None:
        name = words[0] if words else ""
        raise BadInputError(f"{option} is {alert!r}: there is no program {name!r}; give its path, or a URL")


class Alerts:
    """Hands on what `tell` is told; for one asyncio loop."""

    def __init__(self, alert: str, longest_s: float = LONGEST_S) -> None:
        """`alert`: a program and its arguments, or a URL; "" for neither. `longest_s`: how long one may take."""
        self._alert = alert
        self._longest_s = longest_s
        self._waiting: deque[ActionRequested] = deque(maxlen=MOST_WAITING)
        self._work: asyncio.Task[None] | None = None

    def tell(self, event: ActionRequested) -> None:
        """Hand an event on, soon."""
        if not self._alert:
            return
        if len(self._waiting) == MOST_WAITING:
            _log.warning("an alert about event %d is left out: too many wait", self._waiting[0].about_seq)
        self._waiting.append(event)
        if self._work is None:
            self._work = asyncio.get_running_loop().create_task(self._hand_on())

    async def close(self, patience_s: float) -> None:
        """Let those that are left be handed on, but for no longer than this."""
        if self._work is None:
            return
        done, _ = await asyncio.wait((self._work,), timeout=patience_s)
        if not done:
            _log.warning("alerts that have not got through by the job's end are given up")
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)

    async def _hand_on(self) -> None:
        while self._waiting:
            event = self._waiting.popleft()
            try:
                async with asyncio.timeout(self._longest_s):
                    await (self._post(event) if is_webhook(self._alert) else self._run(event))
            except TimeoutError:
                _log.warning("the alert about event %d took longer than %g s", event.about_seq, self._longest_s)
            except (AlertError, OSError) as error:
                _log.warning("the alert about event %d failed: %s", event.about_seq, error)
        self._work = None

    async def _run(self, event: ActionRequested) -> None:
        words = shlex.split(self._alert)
        # In a session of its own, so that all that it may start ends with it.
        process = await asyncio.create_subprocess_exec(
            *words, stdin=PIPE, stdout=DEVNULL, stderr=PIPE, env=for_workers(os.environ), start_new_session=True
        )
        try:
            _, said = await asyncio.gather(_write(process, msgspec.json.encode(event) + b"\n"), _read(process))
            code = await process.wait()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            raise
        if code:
            raise AlertError(f"{words[0]} ended with {code}: {said or 'it said nothing'}")

    async def _post(self, event: ActionRequested) -> None:
        import httpx  # a tenth of a second that few coordinators need

        headers = {"content-type": "application/json"}
        host = urlsplit(self._alert).hostname  # (the rest of the URL may be a secret)
        try:
            async with httpx.AsyncClient(timeout=self._longest_s) as client:
                answer = await client.post(self._alert, content=msgspec.json.encode(event), headers=headers)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise AlertError(f"{host}: {type(error).__name__}") from None
        if answer.is_error:
            raise AlertError(f"{host} answers {answer.status_code}")


async def _write(process: Process, data: bytes) -> None:
    """Write what a program may or may not read."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(data)
        await process.stdin.drain()
    process.stdin.close()


async def _read(process: Process) -> str:
    """Read all that a program complains; return the end of it, on one line."""
    assert process.stderr is not None
    said = b""
    while chunk := await process.stderr.read(4096):
        said = (said + chunk)[-_MOST_SAID:]
    return " ".join(said.decode(errors="replace").split())
