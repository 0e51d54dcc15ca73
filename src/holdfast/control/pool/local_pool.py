"""A pool on one machine: its server, and nodes, as processes of their own; whoever of them dies is started again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from holdfast.control.pool.settings import PoolSettings
from holdfast.control.pool_client import PoolClient
from holdfast.control.pool_node.settings import PoolNodeSettings
from holdfast.control.processes import ChildProcess, describe_exit, die_with_parent, end_all
from holdfast.control.registry import JobEntry
from holdfast.control.serving.listening import bind
from holdfast.errors import EXIT_AFTER_SIGNAL, EXIT_BAD_INPUT, EXIT_DONE, EXIT_OUR_FAULT, HoldfastError, RefusedError

#: how long nodes may take to end in good order
_END_S = 15.0
#: how long it may take to save the jobs before, and how often is looked
_SAVE_S = 60.0
_LOOK_S = 0.1
#: what ends sooner after its start than this is not started again at once
_BRIEF_S = 5.0

_log = logging.getLogger("holdfast.pool")


class ServerOrder(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Be this pool's server, and end with the process `parent`."""

    settings: PoolSettings
    parent: int


class NodeOrder(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Be this node (its settings name the parent)."""

    settings: PoolNodeSettings


def run_local_pool(
    settings: PoolSettings, nodes: int, environment: Mapping[str, str], say: Callable[[str], None]
) -> int:
    """Run a pool with its nodes until Ctrl-C; return the exit code.

    Args:
        nodes: how many, called node-0 on. environment: of the workers.

    Raises:
        BadInputError: the settings or the port cannot be used.
    """
    settings.check()

    async def run() -> int:
        return await _LocalPool(settings, nodes, environment, say).run()

    return asyncio.run(run())


class _LocalPool:
    def __init__(
        self, settings: PoolSettings, nodes: int, environment: Mapping[str, str], say: Callable[[str], None]
    ) -> None:
        if not settings.port:
            # the server is to come back where its nodes look for it
            with bind(settings.host, 0) as free:
                settings = replace(settings, port=free.getsockname()[1])
        self._folder = tempfile.mkdtemp(prefix="holdfast-pool-")
        if settings.store == "memory:":
            # (what lies in the server's memory would end with it)
            store = f"sqlite:{self._folder}/pool.db"
            settings = replace(settings, store=store, folder=settings.folder or Path(self._folder))
        logs = str(settings.folder.absolute() / "logs") if settings.folder else ""
        self._settings = replace(settings, token=settings.token or secrets.token_urlsafe(32), logs=logs)
        self._nodes = nodes
        self._environment = dict(environment)
        self._say = say
        self._children: dict[str, ChildProcess] = {}
        #: jobs that were queued when the pool was told to end
        self._queued: list[str] = []
        self._over: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._again = asyncio.Event()

    async def run(self) -> int:
        """Keep everything running until told to end."""
        loop = asyncio.get_running_loop()
        for name, code in EXIT_AFTER_SIGNAL.items():
            loop.add_signal_handler(signal.Signals[name], partial(self._told, code))
        names = ["server", *(f"node-{index}" for index in range(self._nodes))]
        keeping = [asyncio.create_task(self._keep(name)) for name in names]
        try:
            return await self._over
        finally:
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)
            await self._end()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _told(self, code: int) -> None:
        if self._over.done():
            self._again.set()
        else:
            self._say(
                "holdfast: jobs that keep checkpoints are saved, the others end; then the pool does. Another signal "
                "ends all at once"
            )
            self._over.set_result(code)

    async def _end(self) -> None:
        """Have the jobs saved, end the nodes, then the server, which hears of it."""
        again = asyncio.ensure_future(self._again.wait())
        saving = asyncio.ensure_future(asyncio.to_thread(self._end_jobs))
        await asyncio.wait((saving, again), return_when=asyncio.FIRST_COMPLETED)
        server = self._children.pop("server", None)
        ending = asyncio.ensure_future(end_all(self._children.values(), grace_s=_END_S))
        await asyncio.wait((ending, again), return_when=asyncio.FIRST_COMPLETED)
        again.cancel()
        if not ending.done():
            for child in self._children.values():
                child.send_signal(signal.SIGKILL)
        await ending
        await asyncio.to_thread(self._queue_again)
        if server is not None:
            await end_all([server], grace_s=_END_S)

    def _end_jobs(self) -> None:
        """Suspend the jobs that keep checkpoints, and stop the others that run, as far as the server still does that.

        Those that are queued are not to begin on what these leave. In a thread of its own.
        """
        until = time.monotonic() + _SAVE_S
        with contextlib.suppress(HoldfastError), PoolClient(self._entry()) as client:
            jobs = client.status()["jobs"]
            self._queued = [job["job"] for job in jobs if job["state"] in ("queued", "waiting")]
            for name in self._queued:
                with contextlib.suppress(RefusedError):  # (it has just begun)
                    client.suspend(name)
            for job in jobs:
                if job["state"] == "admitted":
                    self._end_job(client, job["job"], saves=job["saves"])
            while time.monotonic() < until and not self._again.is_set():
                if not any(job["state"] in ("suspending", "stopping") for job in client.status()["jobs"]):
                    return
                time.sleep(_LOOK_S)

    def _queue_again(self) -> None:
        """Once there is no node any more, those that were queued are so again: for the next pool of this store."""
        with contextlib.suppress(HoldfastError), PoolClient(self._entry()) as client:
            for name in self._queued:
                client.resume(name)

    def _end_job(self, client: PoolClient, name: str, *, saves: bool) -> None:
        with contextlib.suppress(RefusedError):  # (it has just ended by itself)
            if saves:
                client.suspend(name)
                self._say(f"holdfast: job {name} is being saved; `holdfast resume -j {name}` takes it up")
            else:
                client.stop(name, now=True, why="its pool was ended, and it keeps no checkpoints")
                self._say(f"holdfast: job {name} keeps no checkpoints, and is stopped")

    def _entry(self) -> JobEntry:
        mine = self._settings
        assert mine.token is not None
        return JobEntry(url=self._url, token=mine.token, job="", pid=0, tls_ca=self._tls_ca, pool=mine.name)

    @property
    def _url(self) -> str:
        return f"{'https' if self._settings.tls_cert else 'http'}://{self._settings.host}:{self._settings.port}"

    @property
    def _tls_ca(self) -> str:
        return str(self._settings.tls_cert.absolute()) if self._settings.tls_cert else ""

    async def _keep(self, name: str) -> None:
        """Start a process, and again whenever it dies."""
        loop = asyncio.get_running_loop()
        while not self._over.done():
            began = loop.time()
            child = self._children[name] = self._start(name)
            code = await child.wait()
            if self._over.done():
                return
            if code in (EXIT_BAD_INPUT, EXIT_OUR_FAULT):
                self._over.set_result(code)
                return
            _log.warning("%s has ended: %s; it is started again", name, describe_exit(code))
            if loop.time() - began < _BRIEF_S:
                await asyncio.sleep(1.0)

    def _start(self, name: str) -> ChildProcess:
        order: ServerOrder | NodeOrder
        if name == "server":
            order = ServerOrder(settings=self._settings, parent=os.getpid())
        else:
            folder = os.path.join(self._folder, name)
            shutil.rmtree(folder, ignore_errors=True)
            os.makedirs(folder, mode=0o700)
            order = NodeOrder(settings=self._node(name, folder))
        command = [sys.executable, "-P", "-m", "holdfast.control.pool.local_pool", name]
        child = ChildProcess(command, stdin=subprocess.PIPE)
        assert child.stdin is not None
        try:
            child.stdin.write(msgspec.json.encode(order, enc_hook=str))
            child.stdin.close()
        except BrokenPipeError:
            pass  # it died at once: its exit says so
        return child

    def _node(self, name: str, folder: str) -> PoolNodeSettings:
        mine = self._settings
        assert mine.token is not None
        return PoolNodeSettings(
            pool=self._url,
            token=mine.token,
            node=name,
            folder=folder,
            tls_ca=self._tls_ca,
            environment=self._environment,
            log_folder=mine.logs,
            shows=False,
            parent=os.getpid(),
        )


def _carry_out(order: ServerOrder | NodeOrder) -> int:
    # Imported only here: each kind needs what the other does not.
    if isinstance(order, NodeOrder):
        from holdfast.control.pool_node.pool_agent import run_pool_agent

        return run_pool_agent(order.settings, _say)
    from holdfast.control.pool.pool_server import run_pool

    die_with_parent(order.parent)
    return run_pool(order.settings)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _to_path(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    raise NotImplementedError(f"{kind} is not for sending")


def main() -> int:
    """Read an order from stdin and carry it out."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=ServerOrder | NodeOrder, dec_hook=_to_path)
    level = "INFO" if isinstance(order, ServerOrder) else order.settings.log.upper()
    logging.basicConfig(level=level, format="%(name)s: %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    try:
        return _carry_out(order)
    except HoldfastError as error:
        _say(f"holdfast: {error}")
        return error.exit_code
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        traceback.print_exc()
        return EXIT_DONE if isinstance(error, KeyboardInterrupt) else EXIT_OUR_FAULT


if __name__ == "__main__":
    sys.exit(main())
