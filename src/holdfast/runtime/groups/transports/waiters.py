"""Threads that wait for operations that cannot be polled: gloo's send and receive only complete in a wait.

Such a wait releases the interpreter's lock. It ends with the operation: when the peer has come, when the sockets are
severed, or when the group's timeout is over. A thread waits for one operation at a time, so there are as many threads
as operations that were ever in progress at once.
"""

from __future__ import annotations

import queue
import threading

import torch.distributed as dist


class WaitedOperation:
    """One operation that a thread waits for."""

    def __init__(self, work: dist.Work) -> None:
        self._work: dist.Work | None = work
        self._ended = threading.Event()
        self._failure = ""

    def done(self) -> bool:
        return self._ended.is_set()

    def sleep(self, seconds: float) -> None:
        self._ended.wait(seconds)

    def finish(self) -> None:
        if self._failure:
            raise RuntimeError(self._failure)

    def wait(self) -> None:
        """Block until the operation has ended, and mark it as done. A failure is not raised; its message is kept for
        `finish`. Called once, in a thread of `WaitThreads`.
        """
        work, self._work = self._work, None
        try:
            if work is not None:
                work.wait()
        except RuntimeError as error:
            self._failure = str(error) or "failed"
        finally:
            del work  # it keeps the group alive
            self._ended.set()


class WaitThreads:
    """The waiting threads of one group."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._operations: queue.SimpleQueue[WaitedOperation | None] = queue.SimpleQueue()
        self._threads = 0
        self._idle = 0

    def wait_for(self, work: dist.Work) -> WaitedOperation:
        """Return an operation that can be polled. An idle thread, or a new one if none is idle, waits for its end.
        Never blocks.
        """
        operation = WaitedOperation(work)
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                self._threads += 1
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
            self._operations.put(operation)
        return operation

    def close(self) -> None:
        """End every thread after its operation. Returns at once. No operation may be added afterwards."""
        with self._lock:
            for _ in range(self._threads):
                self._operations.put(None)
            self._threads = 0

    def _run(self) -> None:
        """Run one thread: take operations from the queue and wait for the end of each, until `close`. Failures stay in
        the operation.
        """
        while (operation := self._operations.get()) is not None:
            operation.wait()
            del operation
            with self._lock:
                self._idle += 1
