"""A worker's loader workers: they fetch micro-batches in advance, and are replaced if they die."""

from __future__ import annotations

import logging
import os
import pickle
import select
import socket
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from holdfast.control.link.forking import ForkedProcess, ProcessForker
from holdfast.errors import BadInputError, HoldfastError
from holdfast.runtime.data.datasets import Fetch
from holdfast.runtime.data.loader_channel import ChannelEnd, Message, MessageKind, unpack_exception
from holdfast.runtime.data.loader_process import LoaderSetting
from holdfast.runtime.data.parcels import pack

logger = logging.getLogger(__name__)

#: micro-batches that each loader worker fetches in advance by default, as in torch
PREFETCH_FACTOR = 2
#: how often a start, or a micro-batch, is tried again after a loader worker died of it
_RETRIES = 1
_EXIT_WAIT_S = 2.0
_MODULE = "holdfast.runtime.data.loader_process"
#: modules that a zygote only for loader workers imports
PRELOAD_FOR_LOADERS = ("numpy", "torch", "torch.utils.data", _MODULE)

#: step and micro-batch
Key = tuple[int, int]


@dataclass(kw_only=True, slots=True, eq=False)
class _LoaderWorker:
    """One loader worker, as seen by its worker."""

    number: int
    channel: ChannelEnd
    process: ForkedProcess
    up: bool = False
    #: requests in progress by number, in the order of work
    requested: dict[int, Key] = field(default_factory=dict[int, Key])

    def close(self) -> None:
        self.channel.close()
        self.process.close()


class LoaderPool:
    """Fetches micro-batches in loader workers. For the training thread; only `wait_for` blocks."""

    def __init__(
        self,
        fetch: Fetch,
        fetch_argument: Callable[[int, int], Any],
        *,
        seed: int,
        part: int = 0,
        workers: int,
        ahead: int,
        processes: ProcessForker,
        keep_apart: bool = False,
    ) -> None:
        """Prepare; no process is started yet.

        Args:
            fetch: makes micro-batches; each loader worker gets a copy.
            fetch_argument: returns the third argument of `fetch`, when a micro-batch is requested.
            seed, part: see `seed_fetch`.
            ahead: how many micro-batches each loader worker may fetch in advance.
            keep_apart: whether one loader worker fetches the same micro-batch of all steps.

        Raises:
            BadInputError: `fetch` cannot be pickled.
        """
        self.capacity = workers * ahead
        self._fetch_argument, self._seed, self._part, self._keep_apart = fetch_argument, seed, part, keep_apart
        self._processes = processes
        self._fetcher = _pack_fetch(fetch)
        self._count = 0
        self._done: dict[Key, Message] = {}
        self._deaths: Counter[Key] = Counter()
        self._failed_starts = 0
        #: how the loader worker that died last ended
        self._last_death = ""
        #: why there will be no more loader workers
        self._failure: BaseException | None = None
        self._numbers = range(workers)
        self._workers: list[_LoaderWorker] = []

    @property
    def workers_up(self) -> int:
        """The number of loader workers that are ready."""
        return sum(worker.up for worker in self._workers)

    def start(self) -> None:
        """Start the loader workers, if they are not started; returns before they are ready.

        Raises:
            HoldfastError: no process can be started.
        """
        if not self._workers:
            self._workers = [self._start_worker(number) for number in self._numbers]

    def request(self, keys: Iterable[Key]) -> None:
        """Request micro-batches, the first `capacity` of these, in this order, unless they are already requested or
        fetched. Earlier requests and results for others are dropped. After a lasting failure nothing is requested, and
        all are dropped.
        """
        self._receive_messages(wait=False)
        requested = list(keys)[: self.capacity] if self._failure is None else []
        for key in [key for key in self._done if key not in requested]:
            self._done.pop(key).close()
        for worker in self._workers:
            for number in [number for number, key in worker.requested.items() if key not in requested]:
                del worker.requested[number]
                worker.channel.send(MessageKind.DROP, number)
        under_way = {key for worker in self._workers for key in worker.requested.values()}
        for key in requested:
            if key not in under_way and key not in self._done:
                self._send_request(key)

    def wait_for(self, key: Key) -> Any:
        """Wait for a requested micro-batch, and return it. Loader workers that die meanwhile are replaced.

        Raises:
            BaseException: an exception of the data set or collate function, or of setting up a loader worker; its cause
                has the original traceback.
            HoldfastError: loader workers die of it, or before they are ready, or cannot be started.
        """
        while key not in self._done:
            if self._failure is not None:
                raise self._failure
            if self._deaths[key] > _RETRIES:
                raise self._make_repeated_death_error()
            self._receive_messages(wait=True)
        message = self._done.pop(key)
        if message.kind is MessageKind.FAILED:
            raise unpack_exception(message.unpack())
        return message.unpack()

    def is_reserved(self, key: Key) -> bool:
        """Return whether a micro-batch must come from a loader worker: it was requested, a loader worker died of it, or
        all do (`keep_apart`).
        """
        under_way = any(key in worker.requested.values() for worker in self._workers)
        return self._keep_apart or under_way or key in self._done or self._deaths[key] > 0

    def will_deliver(self, key: Key) -> bool:
        """Return whether to wait for a loader worker with a micro-batch: if one is ready, one has died of it, all fail
        to start (then `wait_for` raises), or with `keep_apart`.
        """
        self._receive_messages(wait=False)
        return self.workers_up > 0 or self._keep_apart or self._failure is not None or self._deaths[key] > 0

    def close(self) -> None:
        """End the loader workers and, if the pool has started it, the zygote that forks them; drop fetched
        micro-batches.
        """
        for worker in self._workers:
            worker.close()
        for message in self._done.values():
            message.close()
        self._workers, self._done = [], {}
        if self._fetcher >= 0:
            os.close(self._fetcher)
            self._fetcher = -1
        self._processes.close()

    def _start_worker(self, number: int) -> _LoaderWorker:
        """Fork a loader worker, and send it this process's settings and the fetch function.

        Raises:
            HoldfastError: the process cannot be started.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel = ChannelEnd(ours)
        try:
            with theirs:
                process = self._processes.fork(_MODULE, theirs)
        except OSError as error:
            channel.close()
            raise HoldfastError(f"loader worker {number} cannot be started: {error}") from None
        channel.send_packed(MessageKind.SET_UP, 0, LoaderSetting.of_this_process(number, self._seed, self._part))
        channel.send(MessageKind.FETCHER, 0, self._fetcher)
        return _LoaderWorker(number=number, channel=channel, process=process)

    def _send_request(self, key: Key) -> None:
        """Request a micro-batch from the loader worker with the fewest requests; with `keep_apart`, always from the
        same one for its number.
        """
        step, micro_batch = key
        if self._keep_apart:
            worker = self._workers[micro_batch % len(self._workers)]
        else:
            worker = min(self._workers, key=lambda one: len(one.requested))
        self._count += 1
        worker.requested[self._count] = key
        worker.channel.send_packed(
            MessageKind.FETCH, self._count, (step, micro_batch, self._fetch_argument(step, micro_batch))
        )

    def _receive_messages(self, *, wait: bool) -> None:
        """Handle all messages of the loader workers, and replace dead ones; with `wait`, block until there is a message
        or a death.
        """
        poll = select.poll()
        for worker in self._workers:
            poll.register(worker.channel, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(None if wait else 0)}
        for worker in [worker for worker in self._workers if worker.channel.fileno() in ready]:
            try:
                while (message := worker.channel.receive(wait=False)) is not None:
                    self._on_message(worker, message)
            except EOFError:
                self._replace_worker(worker)

    def _on_message(self, worker: _LoaderWorker, message: Message) -> None:
        """Handle a message: the loader worker is ready, its set-up failed (a lasting failure), or it has fetched a
        micro-batch or failed to. Results that are no longer requested are dropped.
        """
        if message.kind is MessageKind.UP:
            worker.up = True
        elif not message.number:
            self._failure = unpack_exception(message.unpack())
        elif message.number in worker.requested:
            self._done[worker.requested.pop(message.number)] = message
        else:
            message.close()  # cancelled meanwhile

    def _replace_worker(self, dead: _LoaderWorker) -> None:
        """Replace a loader worker that died, and send its requests again, except for a micro-batch of which loader
        workers died twice. If two in a row died before they were ready, no more are started: that is a lasting failure,
        which `wait_for` raises.

        Raises:
            HoldfastError: the new process cannot be started.
        """
        how = dead.process.describe_end(_EXIT_WAIT_S)
        dead.close()
        at = next(iter(dead.requested.values()), None) if dead.up else None
        if at is not None:
            self._deaths[at] += 1
        self._failed_starts = 0 if dead.up else self._failed_starts + 1
        self._last_death = f"loader worker {dead.number} ended {_describe_activity(dead, at)}: {how}"
        if self._failed_starts > _RETRIES and self._failure is None:
            self._failure = self._make_repeated_death_error()
        self._workers.remove(dead)
        if self._failure is not None:
            return
        logger.warning("%s; starting another one", self._last_death)
        self._workers.insert(dead.number, self._start_worker(dead.number))
        for key in dead.requested.values():
            if self._deaths[key] <= _RETRIES:
                self._send_request(key)

    def _make_repeated_death_error(self) -> HoldfastError:
        """Return the error for a script if loader workers die repeatedly, with a remedy."""
        memory = "; if memory is short (see dmesg), use fewer loader workers, or a smaller prefetch_factor"
        return HoldfastError(
            f"{self._last_death}; it was tried twice{memory if 'SIGKILL' in self._last_death else ''}; with "
            "num_workers=0 the script fetches in its own process, and shows the error"
        )


def _describe_activity(worker: _LoaderWorker, at: Key | None) -> str:
    """Return when a loader worker died, in words: at the micro-batch `at`, while idle, or before it was ready."""
    if at is not None:
        return f"at micro-batch {at[1]} of step {at[0]}"
    return "while idle" if worker.up else "before it was ready"


def _pack_fetch(fetch: Fetch) -> int:
    """Return a parcel with the pickled fetch function: a descriptor that the caller must close.

    Raises:
        BadInputError: it cannot be pickled.
    """
    try:
        return pack(fetch)
    except (pickle.PicklingError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise BadInputError(
            f"the data set, or its collate function, cannot be sent to loader workers: {error}. Define their classes "
            "and functions at the top level of the script or of a module (no lambda), and open files when samples are "
            "read; or use num_workers=0"
        ) from error
