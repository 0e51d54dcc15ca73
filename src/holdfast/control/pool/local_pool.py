"""A pool on one machine: its server, and nodes, as processes of their own; whoever of them dies is started again."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from holdfast.control.owned_folders import owned_folder
from holdfast.control.pool.jobs_at_end import JobsAtEnd
from holdfast.control.pool.settings import PoolSettings
from holdfast.control.pool_client import PoolClient
from holdfast.control.pool_node.descendants import adopt_orphans, end_all_below
from holdfast.control.pool_node.settings import PoolNodeSettings
from holdfast.control.processes import (
    ChildProcess,
    blocked_sigint,
    describe_exit,
    die_with_parent,
    end_all,
    ending_signals,
    handled_sigint,
    print_error,
    wait_or_end_frozen,
)
from holdfast.control.registry import JobEntry, register, unregister
from holdfast.control.serving.listening import bind
from holdfast.errors import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OUR_FAULT,
    EXIT_REFUSED,
    BadInputError,
    HoldfastError,
    SupersededError,
)

#: bytes of a socket's path in the pool's folder: its node, its grant, and its own name
_SOCKET_NAME = 40
#: how long nodes may take to end in good order
_END_S = 15.0
#: a server that ends while the pool is about to is started again after so long
_AGAIN_S = 0.1
#: what ends sooner after its start than this is not started again at once
_BRIEF_S = 5.0
#: what a server ends with that another one has followed: it is not started again, which would only take the pool back
_FOLLOWED = EXIT_REFUSED
#: who ends so is not started again; but a server that has served finds its store well again some time (there is room on
#: its disk, etcd is back), and the jobs train on until then
_HOPELESS = (EXIT_BAD_INPUT, EXIT_OUR_FAULT)

_log = logging.getLogger("holdfast.pool")


class ServerOrder(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Be this pool's server, and end with the process `parent`; once it serves it makes the file `served`."""

    settings: PoolSettings
    parent: int
    served: str


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
        BadInputError: the settings or the port cannot be used, or another local pool has the store.
        OSError: the kernel does not let it be the parent of its processes' orphans.
    """
    settings.check()

    async def run() -> int:
        adopt_orphans()
        return await _LocalPool(settings, nodes, environment, say, folder).run()

    with _held(settings.store), owned_folder("pool", _SOCKET_NAME) as folder:
        return asyncio.run(run())


@contextlib.contextmanager
def _held(store: str) -> Generator[None]:
    """Have a store's file for this pool alone: another one on it would take its jobs away, and never give them nodes.

    Raises:
        BadInputError: another has it.
    """
    kind, _, path = store.partition(":")
    if kind != "sqlite":
        yield
        return
    try:
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise BadInputError(f"the store {path} cannot be opened: {error.strerror} ({path}.lock)") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise BadInputError(
            f"the store {path} is another pool's, which runs on this machine: hand jobs to that one, end it first "
            "(Ctrl-C), or give another --store"
        ) from None
    finally:
        os.close(lock)


class _LocalPool:
    def __init__(
        self,
        settings: PoolSettings,
        nodes: int,
        environment: Mapping[str, str],
        say: Callable[[str], None],
        folder: str,
    ) -> None:
        if not settings.port:
            # the server is to come back where its nodes look for it
            with bind(settings.host, 0) as free:
                settings = replace(settings, port=free.getsockname()[1])
        self._folder = folder
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
        #: it is to end, and its server is needed for that
        self._saving = False
        #: is there once a server has served
        self._served = Path(self._folder, "served")
        self._over: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._again = asyncio.Event()

    async def run(self) -> int:
        """Keep everything running until told to end."""
        loop = asyncio.get_running_loop()
        for number, code in ending_signals().items():
            loop.add_signal_handler(number, partial(self._told, code))
        names = ["server", *(f"node-{index}" for index in range(self._nodes))]
        mine = self._settings.registry
        # (its commands find it while its server is being started again, too)
        listed = register(mine, self._entry()) if mine is not None else None
        server, *nodes = [asyncio.create_task(self._keep(name)) for name in names]
        try:
            return await self._over
        finally:
            await _cancelled(*nodes)
            await self._end(server)
            if listed is not None:
                unregister(listed)

    def _told(self, code: int) -> None:
        if self._over.done():
            self._again.set()
        else:
            self._say(
                "holdfast: jobs that keep checkpoints are saved, the others end; then the pool does. Another signal "
                "ends all at once"
            )
            self._saving = True
            self._over.set_result(code)

    async def _end(self, keeping: asyncio.Task[None]) -> None:
        """Have the jobs saved, end the nodes, then the server, which hears of it; `keeping`: that one."""
        again = asyncio.ensure_future(self._again.wait())

        def hurried() -> bool:
            # (where no server is started again there is nobody to ask)
            return self._again.is_set() or keeping.done()

        jobs = JobsAtEnd(lambda: PoolClient(self._entry()), hurried, self._say)
        if self._saving:
            saving = asyncio.ensure_future(asyncio.to_thread(jobs.end))
            await asyncio.wait((saving, again), return_when=asyncio.FIRST_COMPLETED)
        nodes = [child for name, child in self._children.items() if name != "server"]
        ending = asyncio.ensure_future(end_all(nodes, grace_s=_END_S))
        await asyncio.wait((ending, again), return_when=asyncio.FIRST_COMPLETED)
        again.cancel()
        if not ending.done():
            for child in nodes:
                child.send_signal(signal.SIGKILL)
        await ending
        await asyncio.to_thread(jobs.queue_again)
        self._saving = False
        await _cancelled(keeping)
        server = self._children.pop("server", None)
        if server is not None:
            await end_all([server], grace_s=_END_S)
        with contextlib.suppress(TimeoutError):  # (what the kernel does not end now)
            await asyncio.wait_for(self._end_orphans(), _END_S)

    def _entry(self) -> JobEntry:
        mine = self._settings
        assert mine.token is not None
        return JobEntry(url=self._url, token=mine.token, job="", pid=os.getpid(), tls_ca=self._tls_ca, pool=mine.name)

    @property
    def _url(self) -> str:
        return f"{'https' if self._settings.tls_cert else 'http'}://{self._settings.host}:{self._settings.port}"

    @property
    def _tls_ca(self) -> str:
        return str(self._settings.tls_cert.absolute()) if self._settings.tls_cert else ""

    async def _keep(self, name: str) -> None:
        """Start a process, and again whenever it dies."""
        loop = asyncio.get_running_loop()
        while self._is_wanted(name):
            began = loop.time()
            child = self._children[name] = self._start(name)
            code = await wait_or_end_frozen(child)
            if not self._is_wanted(name):
                return
            if name != "server":
                await self._end_orphans()
            hopeless = code in _HOPELESS and not (name == "server" and self._served.exists())
            if self._over.done():
                if code == _FOLLOWED or hopeless:
                    return
                await asyncio.sleep(_AGAIN_S)  # (it is to end, but not before its jobs are saved)
                continue
            if hopeless:
                self._over.set_result(code)
                return
            if name == "server" and code == _FOLLOWED:
                self._say("holdfast: another server leads this pool by now: this one ends, with its nodes")
                self._over.set_result(EXIT_FAILED)
                return
            _log.warning("%s has ended: %s; it is started again", name, describe_exit(code))
            if loop.time() - began < _BRIEF_S:
                await asyncio.sleep(1.0)

    async def _end_orphans(self) -> None:
        """End what processes of ours that were killed have left, and return once all of that is gone.

        What a job's script has put into the background does not end by itself with the node's agent, and is to be over
        before the node is given to anybody.
        """
        known = self._children.values
        await end_all_below(lambda: [child.pid for child in known()], trees=True)

    def _is_wanted(self, name: str) -> bool:
        return not self._over.done() or (name == "server" and self._saving)

    def _start(self, name: str) -> ChildProcess:
        order: ServerOrder | NodeOrder
        if name == "server":
            mine = replace(self._settings, registry=None)
            order = ServerOrder(settings=mine, parent=os.getpid(), served=str(self._served))
        else:
            folder = os.path.join(self._folder, name)
            shutil.rmtree(folder, ignore_errors=True)
            os.makedirs(folder, mode=0o700)
            order = NodeOrder(settings=self._node(name, folder))
        command = [sys.executable, "-P", "-m", "holdfast.control.pool.local_pool", name]
        with blocked_sigint():
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


async def _cancelled(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _carry_out(order: ServerOrder | NodeOrder) -> int:
    # Imported only here: each kind needs what the other does not.
    if isinstance(order, NodeOrder):
        from holdfast.control.pool_node.pool_agent import run_pool_agent

        return run_pool_agent(order.settings, print_error)
    from holdfast.control.pool.pool_server import run_pool

    die_with_parent(order.parent)
    return run_pool(order.settings, lambda _: Path(order.served).touch())


def _to_path(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    raise NotImplementedError(f"{kind} is not for sending")


def main() -> int:
    """Read an order from stdin and carry it out."""
    try:
        with handled_sigint():
            order = msgspec.json.decode(sys.stdin.buffer.read(), type=ServerOrder | NodeOrder, dec_hook=_to_path)
            level = "INFO" if isinstance(order, ServerOrder) else order.settings.log.upper()
            logging.basicConfig(level=level, format="%(name)s: %(message)s")
            logging.getLogger("uvicorn").setLevel(logging.WARNING)
            logging.getLogger("httpx").setLevel(logging.WARNING)
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            os.close(null)
            return _carry_out(order)
    except HoldfastError as error:
        print_error(f"holdfast: {error}")
        return _FOLLOWED if isinstance(error, SupersededError) else error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED  # told to end before it had begun: there is nothing to say
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        traceback.print_exc()
        return EXIT_OUR_FAULT


if __name__ == "__main__":
    sys.exit(main())
