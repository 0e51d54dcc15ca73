"""Alerts: events that need a person go to the user's program or webhook. They may fail or hang; the job never waits.

They are sent one at a time, in order, each with a time limit. Nothing goes through a shell, and a program does not get
holdfast's secrets.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from urllib.parse import urlsplit

import msgspec

from holdfast.control.programs import ProgramError, check_program, run_program
from holdfast.errors import BadInputError
from holdfast.protocol.events import ActionRequested

#: seconds that an alert may take; a person is slower
LONGEST_S = 30.0
#: the most waiting alerts; beyond that, the oldest are dropped
MOST_WAITING = 64

_log = logging.getLogger("holdfast.coordinator")


class AlertError(Exception):
    """An alert could not be sent. The message says why."""


def is_webhook(alert: str) -> bool:
    """Return whether an alert is a URL. Otherwise it is a program and its arguments."""
    return alert.lower().startswith(("http://", "https://"))


def check_alert(option: str, alert: str) -> None:
    """Check that an alert can be run or sent: that the program can be executed, or that the URL has a host.

    "" is valid.

    Raises:
        BadInputError: it cannot. The message names the option or key, and the value.
    """
    if not alert:
        return
    if is_webhook(alert):
        with contextlib.suppress(ValueError):
            if urlsplit(alert).hostname and (urlsplit(alert).port or 1):
                return
        raise BadInputError(f"{option} is {alert!r}: it is not a URL; write https://HOST/PATH, or a program")
    check_program(option, alert, instead=", or a URL")


class Alerts:
    """Sends alerts in the background. For one asyncio loop."""

    def __init__(self, alert: str, longest_s: float = LONGEST_S) -> None:
        """Create the queue.

        Args:
            alert: a program and its arguments, or a URL, or "" for neither.
            longest_s: seconds that an alert may take.
        """
        self._alert = alert
        self._longest_s = longest_s
        self._waiting: deque[ActionRequested] = deque(maxlen=MOST_WAITING)
        self._work: asyncio.Task[None] | None = None

    def enqueue(self, event: ActionRequested) -> None:
        """Queue an alert about an event, and start to send.

        If `MOST_WAITING` wait, the oldest one is dropped with a warning. Ignored if no alert is configured.
        """
        if not self._alert:
            return
        if len(self._waiting) == MOST_WAITING:
            _log.warning("an alert about event %d is dropped, because too many wait", self._waiting[0].about_seq)
        self._waiting.append(event)
        if self._work is None:
            self._work = asyncio.get_running_loop().create_task(self._send_queued())

    async def close(self, patience_s: float) -> None:
        """Wait for the queued alerts, at most `patience_s`. Drop the remaining ones with a warning."""
        if self._work is None:
            return
        done, _ = await asyncio.wait((self._work,), timeout=patience_s)
        if not done:
            _log.warning("alerts that were not sent by the end of the job are dropped")
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)

    async def _send_queued(self) -> None:
        """Send the queued alerts in order, each within the time limit. A failure is only logged."""
        while self._waiting:
            event = self._waiting.popleft()
            try:
                async with asyncio.timeout(self._longest_s):
                    await self._send(event)
            except TimeoutError:
                _log.warning("the alert about event %d took longer than %g s", event.about_seq, self._longest_s)
            except (AlertError, ProgramError, OSError) as error:
                _log.warning("the alert about event %d failed: %s", event.about_seq, error)
        self._work = None

    async def _send(self, event: ActionRequested) -> None:
        """POST an event to the webhook as JSON, or pass it to the stdin of the program.

        Raises:
            AlertError, ProgramError, OSError: it failed.
        """
        if is_webhook(self._alert):
            await self._post(event)
        else:
            await run_program(self._alert, msgspec.json.encode(event) + b"\n")

    async def _post(self, event: ActionRequested) -> None:
        """POST an event to the webhook as JSON.

        Raises:
            AlertError: it failed, or the answer is an error. The message names only the host, because the URL may be a
                secret.
        """
        import httpx  # the import takes a tenth of a second, and few coordinators need it

        headers = {"content-type": "application/json"}
        host = urlsplit(self._alert).hostname  # the rest of the URL may be a secret
        try:
            async with httpx.AsyncClient(timeout=self._longest_s) as client:
                answer = await client.post(self._alert, content=msgspec.json.encode(event), headers=headers)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise AlertError(f"{host}: {type(error).__name__}") from None
        if answer.is_error:
            raise AlertError(f"{host} answers {answer.status_code}")
