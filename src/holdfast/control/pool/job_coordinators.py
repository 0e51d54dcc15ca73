"""The coordinators of a pool's jobs, each independent: a failed one is restarted, and the others do not notice."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace
from starlette.types import ASGIApp

from holdfast.control.coordinator.job_host import JobHost
from holdfast.control.coordinator.job_identity import checkpoint_lock, is_running, with_identity
from holdfast.control.coordinator.job_journal import open_journal
from holdfast.control.coordinator.known_checkpoints import load_usable_checkpoints
from holdfast.control.coordinator.settings import ServerSettings
from holdfast.control.coordinator.shell import RecordKeeper
from holdfast.control.failure_classes import read_rules
from holdfast.control.pool.blocking_thread import run_in_thread
from holdfast.control.pool.leftovers import job_key
from holdfast.control.pool.settings import PoolSettings
from holdfast.control.store.interface import Store
from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.inputs import PoolSaid
from holdfast.errors import BadInputError, OutdatedStoreError, SupersededError
from holdfast.protocol.checkpoints.names import StoredFile
from holdfast.protocol.failures import FailureRule
from holdfast.protocol.pool.record import PooledJob
from holdfast.protocol.pool.sharing import JobShares, JobStanding, JobState

#: seconds before a failed coordinator is restarted, at first and at most
_FIRST_PAUSE_S = 0.1
_LAST_PAUSE_S = 5.0

#: Types that several threads decode. msgspec learns the fields of a type at its first use, and a second thread that
#: decodes it meanwhile would crash the process. So they are first used here.
_WARM_DECODERS = tuple(msgspec.json.Decoder(kind) for kind in (StoredFile, FailureRule))

_log = logging.getLogger("holdfast.pool")


class _EndedFirstError(Exception):
    """The end of a job was requested before it had started."""


@dataclass(slots=True)
class _Hosted:
    """A job that needs a coordinator."""

    job: PooledJob
    #: token of the job's nodes
    token: str
    #: the task that keeps the coordinator running
    task: asyncio.Task[None] | None = None
    #: the coordinator, while one runs
    host: JobHost | None = None
    #: the coordinator's application, while one runs
    app: ASGIApp | None = None
    #: the last message from the pool
    shares: JobShares | None = None
    #: whether the job still needs a coordinator
    wanted: bool = True
    #: whether an earlier coordinator has started the job, and it has not ended; None if that is not known yet
    trains: bool | None = None
    #: set when the coordinator must end or retry
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    #: set when the end of the job was requested
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_ending(self) -> bool:
        """Whether the end of the job was requested."""
        return self.shares is not None and self.shares.wish in ("stop", "stop_now")


class JobCoordinators:
    """The coordinators of all jobs of a pool, by job name.

    Args:
        settings: of the pool.
        store: the pool's store, in which each job has its own record.
        now: unix time that never steps back.
        url: URL of the pool.
        on_linked: called with the job when its coordinator can receive messages.
        on_stand: called with the job, and each state that its coordinator reports to the pool.
        nodes: returns the number of nodes of the pool.
    """

    def __init__(
        self,
        settings: PoolSettings,
        store: Store,
        now: Callable[[], float],
        url: str,
        *,
        on_linked: Callable[[str], None],
        on_stand: Callable[[str, JobState], None],
        nodes: Callable[[], int],
    ) -> None:
        self._settings = settings
        self._store = store
        self._now = now
        self._url = url
        self._on_linked = on_linked
        self._on_stand = on_stand
        self._nodes = nodes
        self._hosted: dict[str, _Hosted] = {}
        #: SHA-256 of the authorization header of a job's nodes -> name of the job. A lookup by digest leaks no timing
        #: information about the token.
        self._by_token: dict[bytes, str] = {}
        #: tasks of coordinators that are about to end -> keys of their records
        self._closing: dict[asyncio.Task[None], str] = {}

    # instructions of the pool's machine

    def start(self, job: PooledJob) -> None:
        """Start a coordinator for a job.

        If this submission has one, only update its data. The coordinator of an earlier submission with the same name
        ends first.
        """
        known = self._hosted.get(job.name)
        if known is not None and known.job.submission == job.submission:
            known.job = job
            return
        hosted = self._hosted[job.name] = _Hosted(job, self.token(job.name, job.submission))
        self._by_token[_digest(hosted.token)] = job.name
        before = known.task if known is not None else None
        hosted.task = asyncio.get_running_loop().create_task(self._keep_running(hosted, before))

    def send_shares(self, job: str, shares: JobShares) -> None:
        """Send the pool's decision to a job's coordinator, now or once it runs.

        A decision to stop the job also interrupts the coordinator's start. Ignored if the job has no coordinator, or
        for another submission.
        """
        hosted = self._hosted.get(job)
        if hosted is not None and hosted.job.submission == shares.submission:
            hosted.shares = shares
            if hosted.is_ending:
                hosted.ended.set()
            if hosted.host is not None:
                hosted.host.on_pool_message(PoolSaid(shares))

    def close(self, job: str, submission: int) -> None:
        """End the coordinator of a job in the background, after its last messages to its nodes.

        Its token opens nothing from now on. Ignored for an unknown job or another submission.
        """
        hosted = self._hosted.get(job)
        if hosted is None or hosted.job.submission != submission:
            return
        del self._hosted[job]
        self._by_token.pop(_digest(hosted.token), None)
        hosted.wanted = False
        hosted.woken.set()
        if hosted.task is not None:
            self._closing[hosted.task] = job_key(job, submission)
            hosted.task.add_done_callback(self._closing.pop)

    # queries

    def token(self, job: str, submission: int) -> str:
        """Return the token with which a job's nodes authenticate to its coordinator."""
        return self._settings.job_token(job, submission)

    def find_by_digest(self, header: bytes) -> str | None:
        """Return the job with nodes that send an authorization header with this SHA-256, or None."""
        return self._by_token.get(header)

    def find_job(self, job: str) -> PooledJob | None:
        """Return a job that has, or needs, a coordinator, or None."""
        known = self._hosted.get(job)
        return known.job if known is not None else None

    def used_keys(self) -> set[str]:
        """Return the keys of the records to which a coordinator may still write, also one that is about to end."""
        hosted = {job_key(name, entry.job.submission) for name, entry in self._hosted.items()}
        return hosted | {*self._closing.values()}

    def app(self, job: str) -> ASGIApp | None:
        """Return the application of a job's coordinator, or None while none runs."""
        known = self._hosted.get(job)
        return known.app if known is not None else None

    async def stop(self) -> None:
        """Cancel all coordinators, and wait until they are closed. The jobs train on."""
        tasks = [*self._closing, *(entry.task for entry in self._hosted.values() if entry.task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # one coordinator

    async def _keep_running(self, hosted: _Hosted, previous: asyncio.Task[None] | None) -> None:
        """Run a job's coordinator while it is wanted, after the end of `previous`.

        Restart it after failures, with pauses of up to 5 s.

        A job that has not started, or whose end was requested, is reported to the pool as failed if its input is
        invalid; one whose end is requested before it has started is reported as stopped. Neither is tried again. If
        another pool has taken the job over, give up.
        """
        if previous is not None:
            await asyncio.wait((previous,))
        pause_s = _FIRST_PAUSE_S
        while hosted.wanted:
            began = self._now()
            error = await self._run_until_failure(hosted)
            if isinstance(error, _EndedFirstError):
                self._report_end(hosted, "stopped", "")
                return
            if isinstance(error, BadInputError) and (not hosted.trains or hosted.is_ending):
                self._report_end(hosted, "failed", str(error))
                return
            if isinstance(error, SupersededError):
                _log.error("job %s: another pool has taken it over: %s", hosted.job.name, error)
                return
            if isinstance(error, BadInputError | OutdatedStoreError):
                # its resources worked when it was started: a missing disk may be back soon, and the job trains on
                _log.error("job %s trains on without a coordinator until one can start: %s", hosted.job.name, error)
            elif error is not None:
                _log.error("job %s: its coordinator failed, and is restarted", hosted.job.name, exc_info=error)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S) if self._now() - began < _LAST_PAUSE_S else _FIRST_PAUSE_S
            if hosted.wanted:
                await asyncio.wait((asyncio.ensure_future(hosted.woken.wait()),), timeout=pause_s)

    async def _run_until_failure(self, hosted: _Hosted) -> BaseException | None:
        """Run the coordinator of a job until it ends or fails.

        Return the error, whatever it was, because it affects this job only; None if it has ended in order.
        """
        running = asyncio.create_task(self._run(hosted))
        try:
            await asyncio.wait((running,))
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            hosted.host = hosted.app = None
        return None if running.cancelled() else running.exception()

    def _report_end(self, hosted: _Hosted, standing: JobStanding, why: str) -> None:
        """Report to the pool that a job ends in this state, without having started.

        The reason is cut to 1000 characters.
        """
        job = hosted.job
        self._on_stand(job.name, JobState(submission=job.submission, heard=0, standing=standing, why=why[:1000]))

    async def _run(self, hosted: _Hosted) -> None:
        """Start a job's coordinator, report that it can receive messages, and run it until it is not wanted, or fails.

        If the job is over, wait until the coordinator is not wanted, and then for the job's agents. At the end, close
        the coordinator, and release the checkpoint directory. Any error of the coordinator is raised.
        """
        job = hosted.job
        make_host, lock = await self._open(hosted)
        host: JobHost | None = None
        ticking: asyncio.Task[None] | None = None
        try:
            host = make_host()
            await host.start()
            ticking = asyncio.create_task(host.tick())
            hosted.host, hosted.app = host, host.app()
            if hosted.shares is not None:
                host.on_pool_message(PoolSaid(hosted.shares))
            self._on_linked(job.name)
            unwanted = asyncio.create_task(hosted.woken.wait())
            await asyncio.wait((host.over, ticking, unwanted), return_when=asyncio.FIRST_COMPLETED)
            if host.over.done():
                host.over.result()
                await asyncio.wait((unwanted, ticking), return_when=asyncio.FIRST_COMPLETED)
                await host.wait_for_agents()
            unwanted.cancel()
            if ticking.done():
                ticking.result()
        finally:
            if ticking is not None:
                ticking.cancel()
            if host is not None:
                await host.close()
            await run_in_thread(lock.close)

    async def _open(self, hosted: _Hosted) -> tuple[Callable[[], JobHost], ExitStack]:
        """Read the persistent state of a job, including all checkpoints.

        That may last if their storage does not answer.

        Returns:
            A function that creates the coordinator, and the lock of the checkpoint directory.

        Raises:
            _EndedFirstError: the end of the job was requested meanwhile, and no coordinator has started it.
            BadInputError, OutdatedStoreError, StoreError: the state cannot be used.
        """
        job, nodes = hosted.job, self._nodes()
        keeper = await run_in_thread(lambda: RecordKeeper(self._store, f"{job.name}/{job.submission}"))
        held = keeper.record.held if keeper.record is not None else None
        hosted.trains = held is not None and held.standing == "going"
        opening = asyncio.ensure_future(run_in_thread(lambda: self._open_blocking(hosted, keeper, nodes)))
        ended = asyncio.ensure_future(hosted.ended.wait())
        try:
            await asyncio.wait((opening,) if hosted.trains else (opening, ended), return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():
                raise _EndedFirstError
            return opening.result()
        finally:
            opening.cancel()
            ended.cancel()

    def log_folder(self, job: PooledJob) -> str:
        """Return the folder with the output of a job's workers, or "" if they do not print to files."""
        logs = self._settings.logs
        return job.spec.output.log_dir or (os.path.join(logs, job.name) if logs else "")

    def _open_blocking(
        self, hosted: _Hosted, keeper: RecordKeeper, nodes: int
    ) -> tuple[Callable[[], JobHost], ExitStack]:
        """Open the journal of a job, read its checkpoints, and lock their directory, in a thread.

        Return as `_open`. If the job was ended meanwhile, release the lock again.

        Args:
            hosted: the job
            keeper: of the job's record
            nodes: nodes of the pool

        Raises:
            BadInputError, OutdatedStoreError: a setting, the journal, the checkpoints or their lock cannot be used.
        """
        job, token, spec = hosted.job, hosted.token, hosted.job.spec
        held = keeper.record.held if keeper.record is not None else None
        if not spec.output.events:
            events = self._settings.job_journal(job.name, job.submission)
            spec = replace(spec, output=replace(spec.output, events=events))
        spec = replace(spec, output=replace(spec.output, log_dir=self.log_folder(job)))
        classes = spec.recovery.failure_classes
        if os.path.exists(classes) and not os.path.isfile(classes):
            # opening a named pipe without a writer would block
            raise BadInputError(
                f"recovery.failure_classes is {classes!r}, which is not a file: give a file, or remove the key"
            )
        config = CoordinatorConfig(
            spec=spec,
            rules=read_rules(spec.recovery.failure_classes),
            submission=job.submission,
            pool_nodes=nodes,
            takeover=held is not None and held.standing != "suspended",
        )
        checkpoints = load_usable_checkpoints(spec.checkpoint.dir, _log.warning)
        settings = ServerSettings(config=config, checkpoints=checkpoints, store=self._settings.store)
        settings = with_identity(settings, keeper.record)
        books = open_journal(settings, keeper)
        lock = ExitStack()
        try:
            lock.enter_context(checkpoint_lock(settings, running=is_running(keeper.record)))
        except BadInputError:
            books[0].close()
            raise
        if hosted.ended.is_set() and not hosted.trains:
            lock.close()  # the caller was cancelled

        def report(stands: JobState) -> None:
            """Report the job's state to the pool."""
            self._on_stand(job.name, stands)

        url = f"{self._url}/jobs/{job.name}/job"
        return lambda: JobHost(settings, keeper, books, self._now, url, token, report), lock


def _digest(token: str) -> bytes:
    return hashlib.sha256(b"Bearer " + token.encode()).digest()
