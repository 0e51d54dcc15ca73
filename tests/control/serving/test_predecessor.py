"""A server starts only if the one before it has ended."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from holdfast.control.client import CoordinatorClient
from holdfast.control.registry import JobEntry
from holdfast.control.serving.predecessor import ClientFactory, check_predecessor_ended
from holdfast.errors import BadInputError, UnreachableError

OWN = JobEntry(url="http://127.0.0.1:2", token="t", job="j", pid=1)


class Predecessor:
    """A client of a server that answers with this status, or with an error."""

    def __init__(self, answer: dict[str, Any] | Exception) -> None:
        self.answer = answer
        self.closed = False

    def __call__(self, job: JobEntry, *, timeout_s: float) -> Predecessor:
        return self

    def status(self) -> dict[str, Any]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def close(self) -> None:
        self.closed = True


def check(make_client: ClientFactory, url: str = "http://127.0.0.1:1", own: JobEntry = OWN) -> None:
    asyncio.run(check_predecessor_ended(make_client, "j", url, own, None))


def test_a_predecessor_that_answers_is_an_error() -> None:
    predecessor = Predecessor({"job": "j"})
    with pytest.raises(BadInputError, match=r"another server of job 'j' answers at http://127.0.0.1:1"):
        check(predecessor)
    assert predecessor.closed


@pytest.mark.parametrize("answer", [{"job": "other"}, {}, UnreachableError("no server answers")])
def test_another_server_or_none_at_the_address_is_accepted(answer: dict[str, Any] | Exception) -> None:
    predecessor = Predecessor(answer)
    check(predecessor)
    assert predecessor.closed


@pytest.mark.parametrize("url", ["", OWN.url])
def test_no_request_is_sent_without_an_address_or_to_the_own_address(url: str) -> None:
    check(Predecessor(AssertionError("it is asked")), url)


@pytest.mark.parametrize("url", ["http://127.0.0.1", "ftp://h:1", "http://[::1:7000"])
def test_an_unusable_address_does_not_prevent_the_start(url: str) -> None:
    check(CoordinatorClient, url)


def test_a_missing_certificate_does_not_prevent_the_start(tmp_path: Path) -> None:
    own = JobEntry(url=OWN.url, token="t", job="j", pid=1, tls_ca=str(tmp_path / "gone.pem"))
    check(CoordinatorClient, "https://127.0.0.1:1", own)
