"""Steps with recorded durations, played through the machines that watch a job, to find false alarms about late workers.

A job of nodes with one worker each is played step by step. The durations are drawn from recordings of a real job: how
long a worker computes a micro-batch, how long the reduction takes after the last worker has joined it, and so on. Each
node's `LateWatch` and the job's `Coordinator` run the same code as in a real job, and get the same messages. Rank 0
saves a checkpoint at regular steps. Less often it evaluates in `job.pause()`, while the others wait. A node may get
additional work. Its worker then has a core only for moments, and waits for one in between.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.hang_detection.watchdog import LateWatch
from holdfast.coordination.inputs import Input, Received, Tick
from holdfast.coordination.instructions import Broadcast, Emit, Instruction, Send
from holdfast.coordination.job.coordinator import Coordinator
from holdfast.coordination.timing.reading import CoreWaits, ProgressAccount, Reading, ThreadClock, Total
from holdfast.protocol import events as ev
from holdfast.protocol.job_spec import JobSpec
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.position import Position

#: recorded durations in seconds, by activity
Times = Mapping[str, Sequence[float]]
LOOK_EVERY_S = 8e-3
_LINK_S = 5e-4
#: on a loaded node: the seconds between two polls of a waiting thread, and the seconds that it keeps a core
_STARVED_S, _SLICE_S = 0.45, 3e-3
#: a hanging worker continues after this many seconds
HANGS_S = 60.0


@dataclass
class PlayedFindings:
    """The messages and actions during `steps` steps, which took `seconds` in total on the job's clock."""

    steps: int = 0
    seconds: float = 0.0
    late: int = 0
    probes: int = 0
    #: false alarms: ended workers, lost nodes, inquiries to all workers
    alarms: list[str] = field(default_factory=list[str])
    raised: int = 0


class _Worker:
    """One training thread: its activity, when it began, and the activities that ended."""

    def __init__(self, worker: str, world: int) -> None:
        self.id = worker
        self.totals: dict[msg.Activity, Total] = {}
        self.step, self.since, self.waits = 1, 0.0, False
        self.activity, self.micro_batch = msg.Activity.SCRIPT, -1
        #: the factor by which all its work takes longer
        self.load, self._waited_s, self._cores = 1.0, 0.0, CoreWaits()
        self.hangs = False
        self._world = world

    def at(
        self, activity: msg.Activity, now: float, micro_batch: int = -1, *, waits: bool = False, hangs: bool = False
    ) -> None:
        known, took_s = self.totals.get(self.activity, Total(0, 0.0, 0.0)), now - self.since
        longest_s = max(known.longest_s, took_s)
        self.totals[self.activity] = Total(known.count + 1, known.sum_s + took_s, longest_s)
        self._waited_s += 0.0 if self.waits else took_s * (1.0 - 1.0 / self.load)
        self.activity, self.micro_batch, self.since, self.waits = activity, micro_batch, now, waits
        self.hangs = hangs

    def begin(self, step: int, now: float, load: float) -> None:
        self.step, self.load = step, load
        self.at(msg.Activity.SCRIPT, now)

    def reading(self, now: float) -> Reading:
        return Reading(
            generation=1,
            step=self.step,
            activity=self.activity,
            micro_batch=self.micro_batch if self.micro_batch >= 0 else None,
            since=self.since,
            world=self._world,
            waits_since=self.since if self.waits else None,
            looked=self._looked(now) if self.waits else 0.0,
            starved_s=self._cores.measure(now, {1: self._clock(now)})[1],
        )

    def _looked(self, now: float) -> float:
        every_s = LOOK_EVERY_S if self.load == 1.0 else _STARVED_S
        return now - (now - self.since) % every_s

    def _clock(self, now: float) -> ThreadClock:
        """Return the kernel's report on the thread. A wait for a core is reported only after it ends."""
        if self.load == 1.0 or self.hangs:
            return ThreadClock(False, self.since, self._waited_s)
        if self.waits:
            looked = self._looked(now)
            return ThreadClock(True, looked, self._waited_s + looked - self.since)
        return ThreadClock(True, self.since + min(now - self.since, _SLICE_S), self._waited_s)


class PlayedSteps:
    """One job that plays any number of steps."""

    def __init__(
        self,
        times: Times,
        *,
        nodes: int = 4,
        micro_batches: int = 2,
        seed: int = 1,
        checkpoint_every: int = 50,
        evaluate_every: int = 500,
        slow: Mapping[tuple[int, int], float] | None = None,
        loaded: Mapping[int, tuple[int, float]] | None = None,
        hangs: tuple[int, int] | None = None,
    ) -> None:
        """Prepare a run without playing any step.

        Args:
            times: Recorded seconds, by activity.
            micro_batches: Of a worker, per step.
            slow: (step, micro-batch of the step) -> factor by which it takes longer on every worker.
            loaded: node -> the step from which it has other work, and the factor by which its work then takes longer.
            hangs: The step at which a node's worker hangs in its optimizer, for `HANGS_S`.
        """
        self.found = PlayedFindings()
        self._times = {name: list(values) for name, values in times.items()}
        self._rng = random.Random(seed)
        self._each = micro_batches
        #: the steps between two checkpoints of rank 0, and between two evaluations
        self._every = (checkpoint_every, evaluate_every)
        self._slow, self._loaded, self._hangs = slow or {}, loaded or {}, hangs
        self._now, self._order, self._queue = 1000.0, count(), list[tuple[float, int, Callable[[], None]]]()
        self._free = [self._now] * nodes
        self._workers = [_Worker(f"n{index}/0/{index:08x}", nodes) for index in range(nodes)]
        self._watches = [LateWatch() for _ in range(nodes)]
        self._ended: set[tuple[str, int]] = set()
        spec = JobSpec(name="played", max_nodes=nodes)
        self._coordinator = Coordinator(CoordinatorConfig(spec=spec), Position(), None)
        self._take(self._coordinator.start(self._now, "", 1))
        self._join()

    def run(self, steps: int) -> PlayedFindings:
        """Play this many more steps; return the findings of all steps so far."""
        last = self.found.steps + steps
        for index in range(len(self._watches)):
            self._after(0.0, lambda i=index: self._look(i))
        self._after(0.0, self._tick)
        began = self._now
        while self.found.steps < last:
            self._step(self.found.steps + 1)
            self.found.steps += 1
        self._queue.clear()
        self.found.seconds += self._now - began
        return self.found

    # ---- training ----

    def _step(self, step: int) -> None:
        """Make all workers do a step, each event at its time, so that every check sees the state of its time."""
        ready: list[float] = []
        for rank, worker in enumerate(self._workers):
            at, load = self._free[rank], self._load(rank, step)
            self._at(at, lambda w=worker, a=at, by=load: w.begin(step, a, by))
            at += self._draw("script") * load
            for number in range(self._each):
                micro_batch = rank * self._each + number
                self._at(at, lambda w=worker, a=at, m=micro_batch: w.at(msg.Activity.COMPUTE, a, m))
                at += self._draw("compute") * load * self._slow.get((step, micro_batch), 1.0)
            self._at(at, lambda w=worker, a=at: w.at(msg.Activity.REDUCING, a, waits=True))
            ready.append(at)
        slowest = max(self._load(rank, step) for rank in range(len(self._workers)))
        voting = max(ready) + self._draw("reducing") * slowest
        passed = voting + self._draw("voted") * slowest
        for rank, worker in enumerate(self._workers):
            hangs_s = HANGS_S if self._hangs == (step, rank) else 0.0
            applied = passed + self._draw("applying") * self._load(rank, step) + hangs_s
            self._at(voting, lambda w=worker: w.at(msg.Activity.VOTED, voting, waits=True))
            self._at(passed, lambda w=worker, h=hangs_s > 0.0: w.at(msg.Activity.APPLYING, passed, hangs=h))
            self._at(applied, lambda r=rank: self._applied(r, step))
            self._free[rank] = self._besides(worker, rank, step, applied)
        self._play_until(min(self._free))

    def _besides(self, worker: _Worker, rank: int, step: int, at: float) -> float:
        """Make rank 0 save and evaluate, each at its steps, from this time on; return when it continues."""
        for every, activity in zip(self._every, (msg.Activity.SAVING, msg.Activity.PAUSED), strict=True):
            if not rank and step % every == 0:
                self._at(at, lambda a=activity, t=at: worker.at(a, t))
                at += self._draw(str(activity))
        return at

    def _applied(self, rank: int, step: int) -> None:
        v = msg.Commit(grad_square=1.0, loss_sum=1.0, samples=8, nonfinite=0)
        worker, world = self._workers[rank].id, len(self._workers)
        said = msg.Applied(worker=worker, generation=1, step=step, commit=v, world=world, witness=True)
        self._after(_LINK_S, lambda: self._feed(Received(rank, msg.FromWorker(message=said))))

    def _load(self, rank: int, step: int) -> float:
        """Return the factor by which all work on a node takes longer."""
        begins, times = self._loaded.get(rank, (0, 1.0))
        return times if step >= begins else 1.0

    def _draw(self, name: str) -> float:
        values = self._times.get(name)
        return self._rng.choice(values) if values else 0.0

    # ---- the watching machines ----

    def _look(self, index: int) -> None:
        worker, watch = self._workers[index], self._watches[index]
        readings = {worker.id: worker.reading(self._now)}
        if watch.is_learning_due(self._now):
            watch.learn(self._now, readings, {worker.id: ProgressAccount(totals=dict(worker.totals))})
        for late in watch.find_late(self._now, readings):
            self.found.late += 1
            self._after(_LINK_S, lambda said=late: self._feed(Received(index, said)))
        self._after(watch.check_interval_s, lambda: self._look(index))

    def _tick(self) -> None:
        self._feed(Tick())
        for number in range(len(self._workers)):
            self._feed(Received(number, msg.Heartbeat()))
        self._after(0.1, self._tick)

    def _feed(self, event: Input) -> None:
        self._take(self._coordinator.handle(event, self._now))

    def _take(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Send(number, message):
                    self._told(number, message)
                case Broadcast(numbers, message):
                    for number in numbers:
                        self._told(number, message)
                case Emit(ev.LimitRaised()):
                    self.found.raised += 1
                case Emit(ev.FailureDetected() as failure):
                    self.found.alarms.append(f"{failure.node}: {failure.kind} {failure.detail}")
                case _:
                    pass

    def _told(self, number: int, message: msg.CoordinatorMessage) -> None:
        match message:
            case msg.Probe():
                self.found.probes += number == 0
                self._after(2 * _LINK_S, lambda: self._answer(number, message))
            case msg.EndHung(worker=worker, why=why):
                step = self.found.steps + 1
                if (worker, step) not in self._ended:  # a played worker continues, so its agent gets the order again
                    self._ended.add((worker, step))
                    self.found.alarms.append(f"step {step}: {why}")
            case msg.LookAround():
                self.found.alarms.append(f"step {self.found.steps + 1}: all workers are asked to look around")
            case _:
                pass

    def _answer(self, number: int, probe: msg.Probe) -> None:
        worker = self._workers[number]
        stands = self._watches[number].list_activities(self._now, {worker.id: worker.reading(self._now)}, ())
        self._feed(Received(number, msg.ProbeAnswer(number=probe.number, stands=stands)))

    # ---- time and start ----

    def _at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (time, next(self._order), action))

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self._at(self._now + seconds, action)

    def _play_until(self, time: float) -> None:
        while self._queue and self._queue[0][0] <= time:
            self._now, _, action = heapq.heappop(self._queue)
            action()
        self._now = time

    def _join(self) -> None:
        for number, message in _beginning(self._workers):
            self._feed(Received(number, message))


def _beginning(workers: Sequence[_Worker]) -> Iterator[tuple[int, msg.AgentMessage]]:
    """Yield the agents' messages until all are in the first generation."""
    for number, worker in enumerate(workers):
        yield (
            number,
            msg.Hello(
                protocol=msg.PROTOCOL,
                job="played",
                node=msg.node_of(worker.id),
                session=f"{number:08x}",
                term=0,
                agent_pid=1,
                workers=1,
                digest="",
            ),
        )
        attach = msg.Attach(worker=worker.id, pid=1, host="h", state_port=1, config={}, global_batch=8, micro_batches=8)
        yield number, msg.FromWorker(message=attach)
    for number, worker in enumerate(workers):
        yield number, msg.FromWorker(message=msg.Entered(worker=worker.id, generation=1, applied=0))
