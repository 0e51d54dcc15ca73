"""Threads that wait for work that cannot be polled."""

import threading
from concurrent.futures import Future

import pytest

from holdfast.runtime.groups.transports.waiters import WaitThreads

NAME = "waits-for-a-test"


class FakeWork:
    """Work that ends on request."""

    def __init__(self) -> None:
        self.end: Future[None] = Future()

    def wait(self) -> None:
        self.end.result(60)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def test_each_running_operation_has_a_thread_and_idle_threads_are_reused():
    waiters = WaitThreads(NAME)
    works = [FakeWork() for _ in range(3)]
    operations = [waiters.wait_for(work) for work in works]
    assert len(threads()) == 3
    assert not any(operation.done() for operation in operations)
    operations[1].sleep(0.001)
    works[1].end.set_result(None)
    operations[1].sleep(60)
    assert [operation.done() for operation in operations] == [False, True, False]
    operations[1].finish()
    works[0].end.set_exception(RuntimeError("Connection closed by peer"))
    operations[0].sleep(60)
    with pytest.raises(RuntimeError, match="closed by peer"):
        operations[0].finish()
    for _ in range(20):
        ended = FakeWork()
        ended.end.set_result(None)
        waiters.wait_for(ended).sleep(60)
    assert len(threads()) <= 4  # One thread may not have reported yet that it is idle.
    waiting = threads()
    waiters.close()
    works[2].end.set_result(None)
    for thread in waiting:
        thread.join(60)
    assert threads() == []
    assert operations[2].done()
