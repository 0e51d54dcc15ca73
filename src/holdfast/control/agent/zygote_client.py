"""An agent's end of the zygote: asks for workers, hears of their ends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence

from holdfast.control.link.forking import Exited, Fork, Forked, ForkFailed, Streams, ZygoteReply, start_zygote
from holdfast.control.link.framing import FrameDecoder, FrameError, encode_frame
from holdfast.control.processes import ChildProcess, end_all


class ZygoteLostError(ConnectionError):
    """The zygote is gone, or cannot fork."""


class ZygoteClient(asyncio.Protocol):
    """One connection to a zygote. `on_exit(pid, code)` for each worker that ends, `on_lost` once at the end."""

    def __init__(self, on_exit: Callable[[int, int], None], on_lost: Callable[[], None]) -> None:
        self._on_exit = on_exit
        self._on_lost = on_lost
        self._decoder: FrameDecoder[ZygoteReply] = FrameDecoder(ZygoteReply)
        self._transport: asyncio.Transport | None = None
        self._waiting: dict[int, asyncio.Future[int]] = {}
        self._requests = 0

    @classmethod
    async def connect(
        cls, socket_path: str, on_exit: Callable[[int, int], None], on_lost: Callable[[], None]
    ) -> ZygoteClient:
        """Connect to a zygote, and pass it this process's stdout and stderr for its children.

        Args:
            on_exit: called with pid and exit code of each child that ended.
            on_lost: called when the connection has ended.

        Raises:
            OSError: no zygote listens there.
        """
        loop = asyncio.get_running_loop()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            await loop.sock_connect(connection, socket_path)
            socket.send_fds(connection, [encode_frame(Streams())], [1, 2])
        except OSError:
            connection.close()
            raise
        _, client = await loop.create_unix_connection(lambda: cls(on_exit, on_lost), sock=connection)
        return client

    async def fork(
        self,
        *,
        script: str,
        args: tuple[str, ...],
        env: Mapping[str, str],
        cwd: str,
        output: str,
        errors: str = "",
        as_module: str = "",
    ) -> int:
        """Fork a worker and return its pid, once the zygote has answered.

        Args:
            script: path of the script that it runs.
            args: the script's arguments.
            env: environment variables in addition to the zygote's.
            cwd: its working directory.
            output: file or pipe for stdout, or "" for this process's stdout and stderr.
            errors: file or pipe for stderr, or "" for that of `output`.
            as_module: name under which the script is found as a module, or "" to run it as a file.

        Raises:
            ZygoteLostError: the zygote is gone, or the system cannot create a process.
        """
        if self._transport is None or self._transport.is_closing():
            raise ZygoteLostError("the zygote is gone")
        self._requests += 1
        request = Fork(
            request=self._requests,
            script=script,
            args=args,
            env=dict(env),
            cwd=cwd,
            output=output,
            errors=errors,
            as_module=as_module,
        )
        answer = asyncio.get_running_loop().create_future()
        self._waiting[request.request] = answer
        self._transport.write(encode_frame(request))
        return await answer

    def close(self) -> None:
        """End the connection; the zygote kills what still runs."""
        if self._transport is not None:
            self._transport.close()

    # ---- asyncio's side ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Handle the replies in received data. Abort the connection if they cannot be decoded."""
        try:
            replies = self._decoder.feed(data)
        except FrameError:
            assert self._transport is not None
            self._transport.abort()
            return
        for reply in replies:
            self._on_reply(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail all waiting `fork` calls with ZygoteLostError, and call `on_lost`."""
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ZygoteLostError("the zygote ended"))
        self._waiting.clear()
        self._on_lost()

    def _on_reply(self, reply: ZygoteReply) -> None:
        """Call `on_exit` for an exit. An answer to a request completes its `fork` call, with the pid or an error."""
        if isinstance(reply, Exited):
            self._on_exit(reply.pid, reply.code)
            return
        answer = self._waiting.pop(reply.request, None)
        if answer is None or answer.done():
            return
        if isinstance(reply, Forked):
            answer.set_result(reply.pid)
        else:
            assert isinstance(reply, ForkFailed)
            answer.set_exception(ZygoteLostError(reply.why))


class ZygoteSupply:
    """Gives an agent a zygote: the shared one while it lives, else one of its own, started when it is needed."""

    def __init__(
        self,
        *,
        shared: str,
        folder: str,
        environment: Mapping[str, str],
        preload: Sequence[str],
        on_exit: Callable[[int, int], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._shared = shared
        self._folder = folder
        self._environment = environment
        self._preload = preload
        self._on_exit = on_exit
        self._on_lost = on_lost
        self._client: ZygoteClient | None = None
        self._own: ChildProcess | None = None
        self._count = 0
        self._lock = asyncio.Lock()
        #: socket of the zygote that was given last
        self.path = ""

    async def get(self) -> ZygoteClient:
        """Return the connected zygote, after connecting to the shared one, or to one that is started now.

        If the shared one cannot be reached, it is never tried again.

        Raises:
            OSError: none can be started.
        """
        async with self._lock:
            if self._client is None and self._shared:
                try:
                    self._client = await ZygoteClient.connect(self._shared, self._on_exit, self._forget_client)
                    self.path = self._shared
                except OSError:
                    self._shared = ""  # It will not return, so this agent starts its own.
            if self._client is None:
                self._client = await self._start()
            return self._client

    async def close(self) -> None:
        """End the connection, so that the zygote kills the workers, and end a zygote that this agent has started."""
        client, self._client = self._client, None
        if client is not None:
            client.close()
        if self._own is not None:
            await end_all([self._own], grace_s=1.0)
            self._own = None

    async def _start(self) -> ZygoteClient:
        """End an earlier zygote of this agent, start another, and connect to it. Raises OSError if that fails."""
        if self._own is not None:
            await end_all([self._own], grace_s=1.0)
            self._own.reap()
        self._count += 1
        path = f"{self._folder}/zygote-{self._count}.sock"
        self._own = start_zygote(path, environment=self._environment, preload=self._preload)
        self.path = path
        return await ZygoteClient.connect(path, self._on_exit, self._forget_client)

    def _forget_client(self) -> None:
        """Forget a lost zygote, and call `on_lost`. Ignored after `close`."""
        if self._client is not None:
            self._client = None
            self._on_lost()
