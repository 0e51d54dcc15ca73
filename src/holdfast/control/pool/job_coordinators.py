"""The coordinators of a pool's jobs, each as it would be alone: one that fails is begun again, and no other notices."""

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
from holdfast.control.coordinator.known_checkpoints import intact_checkpoints
from holdfast.control.coordinator.settings import ServerSettings
from holdfast.control.coordinator.shell import RecordKeeper
from holdfast.control.failure_classes import read_rules
from holdfast.control.pool.beside import in_a_thread
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

#: before a coordinator that has failed is begun again: at first, and at the most
_FIRST_PAUSE_S = 0.1
_LAST_PAUSE_S = 5.0

#: What is decoded of several jobs at once. msgspec learns a type's fields where it meets it first, as here: a second
#: thread that came meanwhile would crash the process.
_LEARNT = tuple(msgspec.json.Decoder(kind) for kind in (StoredFile, FailureRule))

_log = logging.getLogger("holdfast.pool")


class _EndedFirstError(Exception):
    """A job was to end before it had begun."""


@dataclass(slots=True)
class _Hosted:
    """A job that is to have a coordinator.

    host: while there is one. shares: what it was told last. trains: an earlier one has begun the job, and it goes on;
    None where that is not known yet. ended: somebody has asked for its end.
    """

    job: PooledJob
    token: str
    task: asyncio.Task[None] | None = None
    host: JobHost | None = None
    app: ASGIApp | None = None
    shares: JobShares | None = None
    wanted: bool = True
    trains: bool | None = None
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_to_end(self) -> bool:
        """Whether somebody has asked for that."""
        return self.shares is not None and self.shares.wish in ("stop", "stop_now")


class JobCoordinators:
    """All of them, by their jobs' names.

    Args:
        store: the pool's own, where each job has a record of its own. url: the pool's. on_linked: called with the job
            whose coordinator can be told something; on_stand: with the job, and what its coordinator says to the pool.
        nodes: returns how many the pool has.
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
        #: the SHA-256 of what their nodes show -> their names (looked up so, no time tells how much of it was right)
        self._by_token: dict[bytes, str] = {}
        #: those that are about to end, by where their records lie
        self._closing: dict[asyncio.Task[None], str] = {}

    # ---- what the pool's machine asks for ----

    def begin(self, job: PooledJob) -> None:
        """Have a coordinator for a job, if there is none."""
        known = self._hosted.get(job.name)
        if known is not None and known.job.submission == job.submission:
            known.job = job
            return
        hosted = self._hosted[job.name] = _Hosted(job, self.token(job.name, job.submission))
        self._by_token[_digest(hosted.token)] = job.name
        before = known.task if known is not None else None
        hosted.task = asyncio.get_running_loop().create_task(self._keep(hosted, before))

    def tell(self, job: str, shares: JobShares) -> None:
        """Tell a job's coordinator; where there is none it is told once there is."""
        hosted = self._hosted.get(job)
        if hosted is not None and hosted.job.submission == shares.submission:
            hosted.shares = shares
            if hosted.is_to_end:
                hosted.ended.set()
            if hosted.host is not None:
                hosted.host.hear(PoolSaid(shares))

    def close(self, job: str, submission: int) -> None:
        """A job needs no coordinator any more; what it has to say still to its nodes it says."""
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

    # ---- who asks for what ----

    def token(self, job: str, submission: int) -> str:
        """Return what a job's nodes show its coordinator."""
        return self._settings.token_of(job, submission)

    def shows(self, header: bytes) -> str | None:
        """Return the job whose token has this SHA-256, as a request's header shows it; None where none has."""
        return self._by_token.get(header)

    def hosted(self, job: str) -> PooledJob | None:
        """Return a job that has, or is to have, a coordinator."""
        known = self._hosted.get(job)
        return known.job if known is not None else None

    def used(self) -> set[str]:
        """Return where the records lie that a coordinator may write to."""
        hosted = {job_key(name, one.job.submission) for name, one in self._hosted.items()}
        return hosted | {*self._closing.values()}

    def app(self, job: str) -> ASGIApp | None:
        """Return what a job's coordinator answers, None while there is none."""
        known = self._hosted.get(job)
        return known.app if known is not None else None

    async def stop(self) -> None:
        """Let go of all of them; the jobs train on."""
        tasks = [*self._closing, *(one.task for one in self._hosted.values() if one.task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- one of them ----

    async def _keep(self, hosted: _Hosted, before: asyncio.Task[None] | None) -> None:
        """Have a coordinator for a job as long as it is wanted, whatever becomes of it."""
        if before is not None:
            await asyncio.wait((before,))
        pause_s = _FIRST_PAUSE_S
        while hosted.wanted:
            began = self._now()
            error = await self._broke(hosted)
            if isinstance(error, _EndedFirstError):
                self._over(hosted, "stopped", "")
                return
            if isinstance(error, BadInputError) and (not hosted.trains or hosted.is_to_end):
                self._over(hosted, "failed", str(error))
                return
            if isinstance(error, SupersededError):
                _log.error("job %s: another pool leads it: %s", hosted.job.name, error)
                return
            if isinstance(error, BadInputError | OutdatedStoreError):
                # (what could be used when it was begun: a disk that is away may be back soon, and it trains on)
                _log.error("job %s trains on without a coordinator, until one can begin: %s", hosted.job.name, error)
            elif error is not None:
                _log.error("job %s: its coordinator failed, and is begun again", hosted.job.name, exc_info=error)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S) if self._now() - began < _LAST_PAUSE_S else _FIRST_PAUSE_S
            if hosted.wanted:
                await asyncio.wait((asyncio.ensure_future(hosted.woken.wait()),), timeout=pause_s)

    async def _broke(self, hosted: _Hosted) -> BaseException | None:
        """Be a job's coordinator; return what has broken it: whatever it was, this job alone has met it."""
        running = asyncio.create_task(self._run(hosted))
        try:
            await asyncio.wait((running,))
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            hosted.host = hosted.app = None
        return None if running.cancelled() else running.exception()

    def _over(self, hosted: _Hosted, standing: JobStanding, why: str) -> None:
        """A job is over without having begun."""
        job = hosted.job
        self._on_stand(job.name, JobState(submission=job.submission, heard=0, standing=standing, why=why[:1000]))

    async def _run(self, hosted: _Hosted) -> None:
        """Be a job's coordinator until it is not wanted, and the job's nodes have heard its last word."""
        job = hosted.job
        make_host, lock = await self._open(hosted)
        host: JobHost | None = None
        ticking: asyncio.Task[None] | None = None
        try:
            host = make_host()
            await host.begin()
            ticking = asyncio.create_task(host.tick())
            hosted.host, hosted.app = host, host.app()
            if hosted.shares is not None:
                host.hear(PoolSaid(hosted.shares))
            self._on_linked(job.name)
            unwanted = asyncio.create_task(hosted.woken.wait())
            await asyncio.wait((host.over, ticking, unwanted), return_when=asyncio.FIRST_COMPLETED)
            if host.over.done():
                host.over.result()
                await asyncio.wait((unwanted, ticking), return_when=asyncio.FIRST_COMPLETED)
                await host.farewell()
            unwanted.cancel()
            if ticking.done():
                ticking.result()
        finally:
            if ticking is not None:
                ticking.cancel()
            if host is not None:
                await host.close()
            await in_a_thread(lock.close)

    async def _open(self, hosted: _Hosted) -> tuple[Callable[[], JobHost], ExitStack]:
        """Read what there is of a job; return what puts its coordinator together, and what holds its directory.

        Its checkpoints are read to the last byte, and may lie where nobody answers: a job that is to end meanwhile, and
        that no coordinator has begun, is over.
        """
        job, nodes = hosted.job, self._nodes()
        keeper = await in_a_thread(lambda: RecordKeeper(self._store, f"{job.name}/{job.submission}"))
        held = keeper.record.held if keeper.record is not None else None
        hosted.trains = held is not None and held.standing == "going"
        opening = asyncio.ensure_future(in_a_thread(lambda: self._opened(hosted, keeper, nodes)))
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
        """Return the folder with the output of a job's workers, "" if they print into no files."""
        logs = self._settings.logs
        return job.spec.output.log_dir or (os.path.join(logs, job.name) if logs else "")

    def _opened(self, hosted: _Hosted, keeper: RecordKeeper, nodes: int) -> tuple[Callable[[], JobHost], ExitStack]:
        """Read the rest, in a thread."""
        job, token, spec = hosted.job, hosted.token, hosted.job.spec
        held = keeper.record.held if keeper.record is not None else None
        if not spec.output.events:
            events = self._settings.journal_of(job.name, job.submission)
            spec = replace(spec, output=replace(spec.output, events=events))
        spec = replace(spec, output=replace(spec.output, log_dir=self.log_folder(job)))
        classes = spec.recovery.failure_classes
        if os.path.exists(classes) and not os.path.isfile(classes):
            # (a pipe that nobody writes to would be waited for)
            raise BadInputError(f"recovery.failure_classes is {classes!r}: that is no file; give one, or none")
        config = CoordinatorConfig(
            spec=spec,
            rules=read_rules(spec.recovery.failure_classes),
            submission=job.submission,
            pool_nodes=nodes,
            takeover=held is not None and held.standing != "suspended",
        )
        checkpoints = intact_checkpoints(spec.checkpoint.dir, _log.warning)
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
            lock.close()  # nobody waits for this any more

        def told(stands: JobState) -> None:
            self._on_stand(job.name, stands)

        url = f"{self._url}/jobs/{job.name}/job"
        return lambda: JobHost(settings, keeper, books, self._now, url, token, told), lock


def _digest(token: str) -> bytes:
    return hashlib.sha256(b"Bearer " + token.encode()).digest()
