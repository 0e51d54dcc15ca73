"""A loader worker: a process that makes micro-batches for one worker, one after the other, and ends with it.

A zygote forks it. Its descriptors are its channel to the worker, stdin, stdout and stderr. The zygote kills it if the
worker ends in the middle of a micro-batch.
"""

from __future__ import annotations

import os
import socket
import sys
from collections import deque

import msgspec
import torch

from holdfast import environment
from holdfast.runtime.data.datasets import Fetch
from holdfast.runtime.data.loader_channel import ChannelEnd, Message, MessageKind, pack_exception
from holdfast.runtime.data.main_module import LoadedMain, MainModule
from holdfast.runtime.data.randomness import seed_fetch

_COMM = "/proc/self/comm"


class LoaderSetting(msgspec.Struct, frozen=True, kw_only=True):
    """The worker's environment, which a loader worker applies to itself."""

    worker_pid: int
    #: of this loader worker, from 0
    number: int
    #: seed and part: see `seed_fetch`
    seed: int
    part: int
    environment: dict[str, str]
    cwd: str
    path: tuple[str, ...]
    argv: tuple[str, ...]
    main: MainModule

    @classmethod
    def of_this_process(cls, number: int, seed: int, part: int) -> LoaderSetting:
        """Return the setting of this process, for its loader worker with this number; the variable of workers is
        replaced by that of loader workers.
        """
        kept = {name: value for name, value in os.environ.items() if name != environment.WORKER}
        return cls(
            worker_pid=os.getpid(),
            number=number,
            seed=seed,
            part=part,
            environment={**kept, environment.LOADER: str(number)},
            cwd=os.getcwd(),
            path=tuple(sys.path),
            argv=tuple(sys.argv),
            main=MainModule.of_this_process(),
        )

    def apply(self) -> None:
        """Set this process's environment variables, working directory, import path and arguments to the worker's, and
        name this process after the worker.
        """
        with open(_COMM, "w") as name:
            name.write(f"loader-{self.worker_pid}")
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.cwd)
        sys.path[:] = self.path
        sys.argv[:] = self.argv


class LoaderProcess:
    """The loop of a loader worker."""

    def __init__(self, channel: ChannelEnd) -> None:
        self._channel = channel
        self._requests: deque[Message] = deque()

    def serve(self) -> None:
        """Set up, report that this process is ready, and answer requests one after the other until the worker is gone.

        Raises:
            EOFError: the worker is gone, or the set-up failed.
        """
        setting, fetch, main = self._set_up()
        self._channel.send(MessageKind.UP)
        while True:
            self._receive_requests()
            self._answer_request(self._requests.popleft(), setting, fetch, main)

    def _set_up(self) -> tuple[LoaderSetting, Fetch, LoadedMain]:
        """Receive the setting and the fetch function, and apply the setting. An exception is sent to the worker.

        Raises:
            EOFError: the set-up failed, or the worker is gone.
        """
        message, given = self._channel.receive(wait=True), self._channel.receive(wait=True)
        assert message is not None
        assert given is not None
        setting: LoaderSetting = message.unpack()
        try:
            setting.apply()
            main = LoadedMain(setting.main)
            fetch: Fetch = given.unpack(main)
        except BaseException as error:
            where = f"loader worker {setting.number}, while it received the data set"
            self._channel.send_packed(MessageKind.FAILED, 0, pack_exception(error, where))
            raise EOFError from error
        return setting, fetch, main

    def _receive_requests(self) -> None:
        """Receive all messages that have arrived: queue requests, and drop cancelled ones from the queue. Wait if the
        queue is empty.

        Raises:
            EOFError: the worker is gone.
        """
        while (message := self._channel.receive(wait=not self._requests)) is not None:
            if message.kind is MessageKind.FETCH:
                self._requests.append(message)
                continue
            for unwanted in [request for request in self._requests if request.number == message.number]:
                self._requests.remove(unwanted)
                unwanted.close()

    def _answer_request(self, request: Message, setting: LoaderSetting, fetch: Fetch, main: LoadedMain) -> None:
        """Seed the random generators, fetch the requested micro-batch, and send it to the worker, or the exception of
        fetching or pickling it.

        Raises:
            Exception: the request cannot be unpickled, e.g. an exception of the script's module, which `main` loads.
        """
        step, micro_batch, argument = request.unpack(main)
        try:
            seed_fetch(setting.seed, step, micro_batch, setting.part, devices=False)
            self._channel.send_packed(MessageKind.DONE, request.number, fetch(step, micro_batch, argument))
        except BaseException as error:  # noqa: BLE001 - an exception of the script's data set or collate function
            where = f"loader worker {setting.number}, at micro-batch {micro_batch} of step {step}"
            self._channel.send_packed(MessageKind.FAILED, request.number, pack_exception(error, where))


def main(descriptor: int) -> int:
    """Run a loader worker, with the worker at the other end of the socket `descriptor`. Return 0 once the worker is
    gone or the set-up has failed. torch computes in one thread.
    """
    torch.set_num_threads(1)
    channel = ChannelEnd(socket.socket(fileno=descriptor))
    try:
        LoaderProcess(channel).serve()
    except EOFError:
        channel.close()
    return 0
