"""One log line for many similar ones."""

from __future__ import annotations

import logging

import pytest

from holdfast.counted_log import MAX_KINDS, CountedLog, CountedRecords

LOG = logging.getLogger("holdfast.test_counted_log")


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def counted(time: Time) -> CountedLog:
    return CountedLog(LOG, time, interval_s=10.0)


def test_the_first_message_is_logged_and_later_ones_are_counted(
    counted: CountedLog, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(50):
        counted.warn("10.0.0.1", f"dropped {number}")
        time.now += 0.1
    assert caplog.messages == ["dropped 0"]
    time.now = 110.0
    counted.flush()
    assert caplog.messages[1:] == ["49 more like this in 10 s, the last: dropped 49"]
    counted.warn("10.0.0.1", "dropped 50")
    time.now = 125.0
    counted.flush()
    counted.flush()
    assert caplog.messages[2:] == ["1 more like this in 15 s, the last: dropped 50"]


def test_a_message_after_a_quiet_interval_is_logged_again(
    counted: CountedLog, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    counted.warn("a", "dropped")
    time.now += 10.0
    counted.warn("a", "dropped again")
    assert caplog.messages == ["dropped", "dropped again"]


def test_each_kind_of_message_is_counted_separately(counted: CountedLog, caplog: pytest.LogCaptureFixture) -> None:
    for kind in ("a", "b", "a", "b", "a"):
        counted.warn(kind, f"{kind} dropped")
    counted.flush(everything=True)
    assert sorted(caplog.messages) == [
        "1 more like this in 0 s, the last: b dropped",
        "2 more like this in 0 s, the last: a dropped",
        "a dropped",
        "b dropped",
    ]


def test_a_thousand_kinds_of_messages_give_few_log_lines(
    counted: CountedLog, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(1000):
        counted.warn(f"10.0.{number}", "dropped")
    assert len(caplog.messages) == MAX_KINDS + 1
    time.now += 10.0
    counted.flush()
    assert caplog.messages[-1] == f"{1000 - MAX_KINDS - 1} more like this in 10 s, the last: dropped"


def test_log_records_of_a_library_are_counted_by_their_format(
    counted: CountedLog, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    library = logging.getLogger("holdfast.test_counted_log.library")
    library.addFilter(CountedRecords(counted))
    with caplog.at_level(logging.INFO):
        for number in range(9):
            library.warning("bad request from %d", number)
            library.info("fine")
    assert caplog.messages.count("fine") == 9
    assert [message for message in caplog.messages if message != "fine"] == ["bad request from 0"]
    time.now += 10.0
    counted.flush()
    assert caplog.messages[-1] == "8 more like this in 10 s, the last: bad request from 8"
