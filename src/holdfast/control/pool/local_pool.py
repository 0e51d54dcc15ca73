"""A pool on one machine: its server and its nodes as processes. A process that dies is restarted."""

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
from holdfast.control.serving.listening import open_listener
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

#: bytes of a socket's path within the pool's folder: its node, its grant, and its own name
_SOCKET_NAME = 40
#: seconds that nodes may take to end in order
_END_S = 15.0
#: seconds before a server that dies during the end of the pool is restarted
_AGAIN_S = 0.1
#: seconds: a process that ends sooner after its start is restarted with a delay
_BRIEF_S = 5.0
#: exit code of a server that another server has superseded; restarting it would only take the pool back
_SUPERSEDED = EXIT_REFUSED
#: exit codes after which a process is not restarted. A server that has served before is restarted even then: its store
#: may work again later (space on the disk, etcd), and the jobs train on until then
_HOPELESS = (EXIT_BAD_INPUT, EXIT_OUR_FAULT)

_log = logging.getLogger("holdfast.pool")


class ServerOrder(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run the server of this pool."""

    settings: PoolSettings
    #: pid of the process with which it ends
    parent: int
    #: path of a file that it creates once it serves
    served: str


class NodeOrder(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run this node. Its settings name the parent."""

    settings: PoolNodeSettings


def run_local_pool(
    settings: PoolSettings, nodes: int, environment: Mapping[str, str], say: Callable[[str], None]
) -> int:
    """Run a pool with its nodes as processes until a signal, and return the exit code.

    Jobs with checkpoints are saved at the end.

    Args:
        settings: of the pool.
        nodes: number of nodes, called node-0, node-1, ...
        environment: of the workers.
        say: prints a line for the user.

    Raises:
        BadInputError: the settings or the port cannot be used, or another local pool uses the store.
        OSError: the kernel does not let this process adopt its orphaned descendants.
    """
    settings.check()

    async def run() -> int:
        adopt_orphans()
        return await _LocalPool(settings, nodes, environment, say, folder).run()

    with _lock_store(settings.store), owned_folder("pool", _SOCKET_NAME) as folder:
        return asyncio.run(run())


@contextlib.contextmanager
def _lock_store(store: str) -> Generator[None]:
    """Hold a lock next to the file of a SQLite store.

    Other stores need none. A second pool would take over the jobs of the first, and never give them nodes.

    Raises:
        BadInputError: another pool has it, or the lock file cannot be opened.
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
            f"the store {path} is in use by another pool on this machine: submit jobs to that pool, end it first "
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
            # a restarted server must get the same port, at which its nodes look for it
            with open_listener(settings.host, 0) as free:
                settings = replace(settings, port=free.getsockname()[1])
        self._folder = folder
        if settings.store == "memory:":
            # the server's memory would be lost with it
            store = f"sqlite:{self._folder}/pool.db"
            settings = replace(settings, store=store, folder=settings.folder or Path(self._folder))
        logs = str(settings.folder.absolute() / "logs") if settings.folder else ""
        self._settings = replace(settings, token=settings.token or secrets.token_urlsafe(32), logs=logs)
        self._nodes = nodes
        self._environment = dict(environment)
        self._say = say
        self._children: dict[str, ChildProcess] = {}
        #: whether jobs are being saved before the end, for which the server is needed
        self._is_saving = False
        #: exists once a server has served
        self._served = Path(self._folder, "served")
        self._exit_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._hurry = asyncio.Event()

    async def run(self) -> int:
        """List the pool for commands, and run its server and nodes until a signal, or until a restart cannot help.

        Then end all of them, and return the exit code.
        """
        loop = asyncio.get_running_loop()
        for number, code in ending_signals().items():
            loop.add_signal_handler(number, partial(self._on_signal, code))
        names = ["server", *(f"node-{index}" for index in range(self._nodes))]
        registry = self._settings.registry
        # commands also find it while the server restarts
        listed = register(registry, self._registry_entry()) if registry is not None else None
        server, *nodes = [asyncio.create_task(self._keep_running(name)) for name in names]
        try:
            return await self._exit_code
        finally:
            await _cancel(*nodes)
            await self._end(server)
            if listed is not None:
                unregister(listed)

    def _on_signal(self, code: int) -> None:
        """At the first signal, announce the end, save the jobs, and end with this exit code.

        A further one ends everything at once.
        """
        if self._exit_code.done():
            self._hurry.set()
        else:
            self._say(
                "holdfast: jobs with checkpoints are saved, the others are stopped; then the pool ends. Another signal "
                "ends everything at once"
            )
            self._is_saving = True
            self._exit_code.set_result(code)

    async def _end(self, keeping: asyncio.Task[None]) -> None:
        """End the jobs if a signal came, then the nodes, then the server, and last all orphans.

        A further signal kills the nodes and shortens all waits.

        Args:
            keeping: the task that keeps the server running.
        """
        again = asyncio.ensure_future(self._hurry.wait())

        def hurried() -> bool:
            # without a server there is nothing to wait for
            return self._hurry.is_set() or keeping.done()

        jobs = JobsAtEnd(lambda: PoolClient(self._registry_entry()), hurried, self._say)
        if self._is_saving:
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
        self._is_saving = False
        await _cancel(keeping)
        server = self._children.pop("server", None)
        if server is not None:
            await end_all([server], grace_s=_END_S)
        with contextlib.suppress(TimeoutError):  # some processes may not end until later
            await asyncio.wait_for(self._end_orphans(), _END_S)

    def _registry_entry(self) -> JobEntry:
        """Return the entry under which commands of this machine find the pool."""
        settings = self._settings
        assert settings.token is not None
        return JobEntry(
            url=self._url, token=settings.token, job="", pid=os.getpid(), tls_ca=self._tls_ca, pool=settings.name
        )

    @property
    def _url(self) -> str:
        return f"{'https' if self._settings.tls_cert else 'http'}://{self._settings.host}:{self._settings.port}"

    @property
    def _tls_ca(self) -> str:
        return str(self._settings.tls_cert.absolute()) if self._settings.tls_cert else ""

    async def _keep_running(self, name: str) -> None:
        """Start a process by its name ("server" or "node-N"), and restart it whenever it dies.

        Orphans of a node end first. While the pool ends, only a server that still saves jobs is restarted.

        If a restart cannot help, or another server has taken over, set the exit code of the pool instead.
        """
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
            if self._exit_code.done():
                if code == _SUPERSEDED or hopeless:
                    return
                await asyncio.sleep(_AGAIN_S)  # the pool ends, but only after its jobs are saved
                continue
            if hopeless:
                self._exit_code.set_result(code)
                return
            if name == "server" and code == _SUPERSEDED:
                self._say("holdfast: another server has taken over this pool, so this one ends with its nodes")
                self._exit_code.set_result(EXIT_FAILED)
                return
            _log.warning("%s has ended: %s; it is restarted", name, describe_exit(code))
            if loop.time() - began < _BRIEF_S:
                await asyncio.sleep(1.0)

    async def _end_orphans(self) -> None:
        """End the descendants that killed processes of the pool have left, and return once all are gone.

        Background processes of a job's script survive the agent of their node. They must end before the node is granted
        again.
        """
        known = self._children.values
        await end_all_below(lambda: [child.pid for child in known()], trees=True)

    def _is_wanted(self, name: str) -> bool:
        return not self._exit_code.done() or (name == "server" and self._is_saving)

    def _start(self, name: str) -> ChildProcess:
        """Start the server or a node as a child process, and send its settings to its stdin.

        A node gets an empty folder. A child that dies at once is returned, too.
        """
        order: ServerOrder | NodeOrder
        if name == "server":
            settings = replace(self._settings, registry=None)
            order = ServerOrder(settings=settings, parent=os.getpid(), served=str(self._served))
        else:
            folder = os.path.join(self._folder, name)
            shutil.rmtree(folder, ignore_errors=True)
            os.makedirs(folder, mode=0o700)
            order = NodeOrder(settings=self._node_settings(name, folder))
        command = [sys.executable, "-P", "-m", "holdfast.control.pool.local_pool", name]
        with blocked_sigint():
            child = ChildProcess(command, stdin=subprocess.PIPE)
        assert child.stdin is not None
        try:
            child.stdin.write(msgspec.json.encode(order, enc_hook=str))
            child.stdin.close()
        except BrokenPipeError:
            pass  # it died at once, and its exit code shows why
        return child

    def _node_settings(self, name: str, folder: str) -> PoolNodeSettings:
        """Return the settings of a node, with which it reaches this pool's server."""
        settings = self._settings
        assert settings.token is not None
        return PoolNodeSettings(
            pool=self._url,
            token=settings.token,
            node=name,
            folder=folder,
            tls_ca=self._tls_ca,
            environment=self._environment,
            log_folder=settings.logs,
            shows=False,
            parent=os.getpid(),
        )


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    """Cancel tasks, and wait until they have ended. Their errors are ignored."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _execute(order: ServerOrder | NodeOrder) -> int:
    """Run a node, or the server, which ends with its parent and creates the file `served` once it is ready.

    Return the exit code.
    """
    # Imported only here, because a server and a node need different modules.
    if isinstance(order, NodeOrder):
        from holdfast.control.pool_node.pool_agent import run_pool_agent

        return run_pool_agent(order.settings, print_error)
    from holdfast.control.pool.pool_server import run_pool

    die_with_parent(order.parent)
    return run_pool(order.settings, lambda _: Path(order.served).touch())


def _to_path(kind: type, value: Any) -> Any:
    """Decode a `Path` from JSON.

    Raises:
        NotImplementedError: another type.
    """
    if kind is Path:
        return Path(value)
    raise NotImplementedError(f"{kind} cannot be sent")


def main() -> int:
    """Read an order from stdin, run that server or node, and return its exit code.

    Errors of holdfast are printed in a line and have their own codes; others are printed with a traceback.
    """
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
            return _execute(order)
    except HoldfastError as error:
        print_error(f"holdfast: {error}")
        return _SUPERSEDED if isinstance(error, SupersededError) else error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED  # interrupted before it had started, so there is nothing to report
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        traceback.print_exc()
        return EXIT_OUR_FAULT


if __name__ == "__main__":
    sys.exit(main())
