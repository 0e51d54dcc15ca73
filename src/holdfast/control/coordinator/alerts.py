"""Alerts: what needs a person is handed to the user's program or webhook. It may fail or hang; the job never waits.

One at a time, in order, each with a limit; nothing goes through a shell, and none of our secrets goes along.
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

#: how long one may take: a person is slower
LONGEST_S = 30.0
#: that wait for their turn; of more, the oldest go
MOST_WAITING = 64

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
    check_program(option, alert, instead=", or a URL")


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
                    await self._hand(event)
            except TimeoutError:
                _log.warning("the alert about event %d took longer than %g s", event.about_seq, self._longest_s)
            except (AlertError, ProgramError, OSError) as error:
                _log.warning("the alert about event %d failed: %s", event.about_seq, error)
        self._work = None

    async def _hand(self, event: ActionRequested) -> None:
        if is_webhook(self._alert):
            await self._post(event)
        else:
            await run_program(self._alert, msgspec.json.encode(event) + b"\n")

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
