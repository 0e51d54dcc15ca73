"""A job of real worker processes; a thread with the coordinator's machine replaces the server and the agents."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
from msgspec.structs import replace

from holdfast.control.link.forking import PRELOAD
from holdfast.control.link.framing import FrameDecoder, FromWorkerProcess, encode_frame
from holdfast.control.link.worker_settings import WorkerSettings
from holdfast.coordination.agent.instructions import SendToWorkers
from holdfast.coordination.agent.known_plans import KnownPlans
from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.inputs import Disconnected, InjectFault, Planned, Received, Tick
from holdfast.coordination.instructions import Broadcast, Emit, EndJob, Persist, PlanExperts, Send
from holdfast.coordination.job.coordinator import Coordinator
from holdfast.protocol import events as ev
from holdfast.protocol.job_spec import CheckpointSpec, ExperimentSpec, ExpertSpec, JobSpec
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.position import Position

DEADLINE_S = 120.0
JOB = "test"

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([*PRELOAD, "holdfast.coordination.job.coordinator"])


@contextmanager
def misled(job: Any, how: str) -> Generator[None]:
    """Give one attempt wrong micro-batches: the next rank's, the same one twice, or those of the step before."""
    workload = job._session.workload
    load = workload.load_micro_batch
    if how == "swapped":
        workload.load_micro_batch = lambda number: load((number + 1) % workload.micro_batches)
    elif how == "doubled":
        # Fetch the first micro-batch again, once.
        workload.load_micro_batch = lambda number: load(
            workload.sums.micro_batches[0] if workload.sums.micro_batches else number
        )
    elif how == "stale":
        workload.sums.step -= 1
    yield
    workload.load_micro_batch = load
    workload.sums.step += how == "stale"


@contextmanager
def lingering(job: Any, due: dict[str, int], node: str, step: int, directory: Path) -> Generator[None]:
    """Delay one node's reduction of a step until the node is stopped, so that all other nodes are READY and it is not.

    Each other node creates a file when it votes.
    """
    session = job._session
    reduce, begin_vote = session.workload.reduce, session._machine.begin_vote

    def late(*arguments: Any) -> Any:
        v = reduce(*arguments)
        with session._shared.changed:
            session._shared.changed.wait_for(lambda: session._machine.frozen, DEADLINE_S)
        return v

    def seen() -> bool:
        (directory / f"{node}.votes").touch()
        return begin_vote()

    if due.get(node) == step:
        del due[node]  # Only the first attempt is delayed.
        session.workload.reduce = late
    elif step in due.values():
        session._machine.begin_vote = seen
    yield
    session.workload.reduce, session._machine.begin_vote = reduce, begin_vote


def is_open(job: Any, gate: int, due: Path) -> bool:
    """Return whether a gate is open and the fault phase in the file `due`, if any, has reached this worker."""
    if not due.with_name(f"go{gate}").exists():
        return False
    return not due.exists() or job._session._faults.is_due(due.read_text(), gate)


def note_shadow(job: Any, step: Any, applied: bool, path: Path) -> None:
    """Record a shadow step as its script sees it."""
    if step.shadow:
        row = [step.number, applied, math.isnan(step.loss), step.metrics, job.world_size]
        with path.open("a") as file:
            print(json.dumps(row), file=file)


def train(directory: str, node: str, options: dict[str, Any]) -> None:
    """The default script of every worker: a small regression that writes one line of JSON per applied step."""
    import torch

    import holdfast

    torch.set_num_threads(1)
    torch.manual_seed(hash(node) % 1000 if options.get("different_start") else 0)
    job = holdfast.init()
    dtype = torch.float64 if options.get("float64") else torch.float32
    width = options.get("width", 16)
    norms: list[torch.nn.Module] = []
    # This precedes all trained layers, so the summation order of gradients does not matter.
    if "batch_norm" in options:
        frozen = torch.nn.Linear(8, 8).requires_grad_(False)
        norms = [torch.nn.BatchNorm1d(8, affine=False), frozen, torch.nn.BatchNorm1d(8, momentum=None)]
    model = torch.nn.Sequential(
        *norms,
        torch.nn.Linear(8, width),
        torch.nn.Dropout(0.1),
        torch.nn.Tanh(),
        torch.nn.Linear(width, 1),
    ).to(job.device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    scaler = torch.amp.GradScaler("cpu", init_scale=options.get("scale", 1.0), growth_interval=2)
    half = "scale" in options
    wrong, lingers = dict(options.get("wrong", {})), dict(options.get("lingers", {}))
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(50, 8, generator=generator, dtype=dtype)
    data_of = Streams if options.get("streams") else torch.utils.data.TensorDataset
    job.protect(
        model,
        optimizer,
        data_of(x, x.sum(1, keepdim=True)),
        global_batch=options.get("global_batch", 24),
        micro_batch=4,
        seed=3,
        max_grad_norm=1.0,
        scaler=scaler if half else None,
        extra={"scheduler": scheduler},
    )
    if "evaluate" in options:
        evaluated = torch.utils.data.TensorDataset(x[:22], x[:22].sum(1, keepdim=True))
        job.evaluate(evaluation(job, model, Path(directory), node, options["evaluate"]), evaluated, every=3)
    gates = options.get("gates", ())
    with (Path(directory) / f"{node}.jsonl").open("a") as file:
        for step in job.steps(options["steps"]):
            while step.number in gates and not is_open(job, step.number, Path(directory) / f"{node}.due"):
                time.sleep(0.005)
            how, due = wrong.get(node, ("", 0))
            if step.number == due:
                del wrong[node]  # Only the first attempt is wrong.
            with misled(job, how) if step.number == due else nullcontext():
                for inputs, targets in step.micro_batches():
                    outputs = model(inputs)
                    if half:  # Make gradients overflow as they would in float16.
                        outputs.register_hook(lambda gradient: gradient.half().to(dtype))
                    loss = torch.nn.functional.mse_loss(outputs, targets)
                    step.backward(loss)
                    if options.get("logs"):
                        step.log({"x": inputs.sum(), "wrong": float("nan")})
                        step.log({"largest": loss}, reduce="max")
            if options.get("logs"):
                step.log({"rate": optimizer.param_groups[0]["lr"]})
                step.log({"workers": 1}, reduce="sum")
            with lingering(job, lingers, node, step.number, Path(directory)):
                applied = step.apply()
            note_shadow(job, step, applied, Path(directory) / f"{node}.shadows")
            if applied:
                print(
                    json.dumps([step.number, step.loss, job.rank, job.world_size, step.metrics]), file=file, flush=True
                )

    if "batch_norm" in options:
        found = {name: buffer.double().view(-1).tolist() for name, buffer in model.named_buffers()}
        statistics = {name: [value.hex() for value in values] for name, values in found.items()}
        (Path(directory) / f"{node}.statistics").write_text(json.dumps(statistics))


class Streams:
    """A data set of streams: four rows at a time, with one stream per micro-batch."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y

    def open(self, micro_batch: int, micro_batches: int) -> OnePass:
        return OnePass(self.x[micro_batch::micro_batches], self.y[micro_batch::micro_batches])


class OnePass:
    """One pass through a stream of whole micro-batches; no two passes are alike."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y
        self.state = {"next": 0, "epoch": 0}

    def set_epoch(self, epoch: int) -> None:
        self.state["epoch"] = epoch

    def state_dict(self) -> dict[str, int]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = dict(state)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        while self.state["next"] + 4 <= len(self.x):
            at = self.state["next"]
            self.state["next"] += 4
            yield self.x[at : at + 4] + self.state["epoch"] / 100, self.y[at : at + 4]


def evaluation(job: Any, model: Any, directory: Path, node: str, dies: dict[str, int]) -> Callable[[Any], Any]:
    """Return an evaluation function that records its shards; the node's process dies in its n-th one."""
    import torch

    begun = 0

    def measure(batch: Any) -> dict[str, Any]:
        nonlocal begun
        begun += 1
        if begun == dies.get(node):
            os.kill(os.getpid(), signal.SIGKILL)
        inputs, targets = batch
        model.eval()
        with (directory / f"{node}.shards").open("a") as file:
            print(inputs[0, 0].item(), file=file, flush=True)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        return {"loss": loss, "x": inputs.mean(), "noise": float(torch.rand(()))}

    return measure


def _child(settings: WorkerSettings, node: str, directory: str, options: dict[str, Any]) -> None:
    os.environ.update(settings.to_environment())
    options.get("script", train)(directory, node, options)


def _wait_stopped(pid: int) -> None:
    """Wait until every thread of a process has stopped: SIGSTOP takes effect later than kill() returns."""
    deadline = time.monotonic() + DEADLINE_S
    while any(
        stat.read_text().rpartition(")")[2].split()[0] != "T" for stat in Path(f"/proc/{pid}/task").glob("*/stat")
    ):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.001)


class _Node:
    """A replacement for one agent: a listening socket, the worker process, and the connection once it exists."""

    def __init__(self, name: str, number: int, directory: Path) -> None:
        self.name = name
        self.number = number
        self.worker = msg.worker_id(name, 0, f"{number:x}")
        self.path = str(directory / f"{number}.sock")
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(self.path)
        self.listener.listen(1)
        self.connection: socket.socket | None = None
        self.decoder: FrameDecoder[Any] = FrameDecoder(FromWorkerProcess)
        self.process: Any = None
        self.plans = KnownPlans()
        self.warms = ""
        self.attach: msg.Attach | None = None


class Cluster:
    """Starts workers, lets the machine coordinate them, and records all events and messages."""

    def __init__(
        self,
        directory: Path,
        *,
        nodes: int,
        options: dict[str, Any],
        checkpoint_every: int = 0,
        zygote: str = "",
        experts: ExpertSpec | None = None,
    ) -> None:
        """Start the nodes' workers.

        Args:
            zygote: the socket of the zygote that forks loader workers, or "" without loader workers.
            experts: placement and search interval of the experts; every placement found is adopted.
        """
        self.directory = directory
        self._zygote = zygote
        self._experts = experts or ExpertSpec()
        self._planned: list[Planned] = []
        self.options = options
        self.events: list[ev.Event] = []
        self.messages: list[Any] = []
        self.over: EndJob | None = None
        self._checkpoint_every = checkpoint_every
        self._changed = threading.Condition(threading.RLock())
        self._nodes: dict[int, _Node] = {}
        self._closing = False
        self._failure: BaseException | None = None
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        config = CoordinatorConfig(
            spec=JobSpec(
                name=JOB, max_nodes=nodes, experts=self._experts, experiments=ExperimentSpec(allow_faults=True)
            ),
            lease_s=600.0,
            tick_s=0.05,
            secret=b"s" * 32,
        )
        self.machine = Coordinator(config, Position(), None)
        self._do(self.machine.start(time.time(), "test:", os.getpid()))
        self._thread = threading.Thread(target=self._run, name="cluster")
        for _ in range(nodes):
            self.add()
        self._thread.start()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._closing = True
        self._waker.send(b"x")
        self._thread.join()
        for node in self._nodes.values():
            if node.process.is_alive():
                node.process.kill()  # This also works on a stopped process.
            node.process.join()
            node.listener.close()
            if node.connection is not None:
                node.connection.close()
        self._selector.close()
        self._wake.close()
        self._waker.close()
        if self._failure is not None and kind is None:
            raise self._failure

    # ---- actions of tests ----

    def add(self, *, warm: str = "") -> str:
        """Start one more node; its worker warms up "before" or "while" the others learn of it, or not at all ("")."""
        with self._changed:
            number = len(self._nodes) + 1
            node = _Node(f"n{number}", number, self.directory)
            node.warms = warm
            self._nodes[number] = node
        every = self._checkpoint_every
        checkpoint = CheckpointSpec(dir=str(self.directory / "checkpoints") if every else "", every=every or 1)
        settings = WorkerSettings(
            socket=node.path,
            worker=node.worker,
            zygote=self._zygote,
            spec=JobSpec(
                name=JOB, checkpoint=checkpoint, experts=self._experts, experiments=ExperimentSpec(verify_state=1)
            ),
        )
        node.process = _context.Process(target=_child, args=(settings, node.name, str(self.directory), self.options))
        node.process.start()
        with self._changed:
            self._selector.register(node.listener, selectors.EVENT_READ, node)
        self._waker.send(b"x")
        return node.name

    def fail(self, name: str, *, how: str = "kill", step: int | None = None, phase: str = "") -> None:
        """Inject a fault into a node's only worker; the simulated agent dies with it."""
        with self._changed:
            self._do(
                self.machine.handle(InjectFault(fault=how, node=name, worker=0, step=step, phase=phase), time.time())
            )

    def kill(self, name: str) -> None:
        """SIGKILL a node's worker immediately."""
        node = next(node for node in self._nodes.values() if node.name == name)
        os.kill(node.process.pid, signal.SIGKILL)

    def go(self, *steps: int) -> None:
        """Open the gates before these steps, or all of `options["gates"]` if no step is named."""
        for step in steps or self.options["gates"]:
            (self.directory / f"go{step}").touch()

    def pause_and_expel(self, name: str) -> None:
        """SIGSTOP a node's worker, and end its connection as an expulsion does."""
        node = next(node for node in self._nodes.values() if node.name == name)
        os.kill(node.process.pid, signal.SIGSTOP)
        _wait_stopped(node.process.pid)
        with self._changed:
            assert node.connection is not None
            self._selector.unregister(node.connection)
            node.connection.close()
            self._do(self.machine.handle(Disconnected(node.number), time.time()))

    def resume(self, name: str) -> int | None:
        """SIGCONT a node's worker, and return its exit code."""
        node = next(node for node in self._nodes.values() if node.name == name)
        assert node.process.exitcode is None, f"{name} did not stay stopped: it ended with {node.process.exitcode}"
        os.kill(node.process.pid, signal.SIGCONT)
        node.process.join(DEADLINE_S)
        return node.process.exitcode

    def wait(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait until a condition over events and messages holds."""
        with self._changed:
            done = self._changed.wait_for(lambda: condition() or self._failure is not None, timeout=DEADLINE_S)
            if self._failure is not None:
                raise self._failure
            assert done, f"{what} did not happen; events: {self.events[-12:]}"

    def wait_done(self) -> None:
        """Wait until the job and its worker processes have ended."""
        self.wait("the job's end", lambda: self.over is not None)
        for node in self._nodes.values():
            node.process.join(DEADLINE_S)

    def of(self, kind: type[Any]) -> list[Any]:
        """Return all events of a type."""
        return [event for event in self.events if isinstance(event, kind)]

    def messages_of(self, kind: type[Any]) -> list[Any]:
        """Return all messages of a type that workers sent."""
        return [message for message in self.messages if isinstance(message, kind)]

    def exit_codes(self) -> dict[str, int | None]:
        """Return the exit codes of the workers."""
        return {node.name: node.process.exitcode for node in self._nodes.values()}

    def steps(self) -> dict[int, float]:
        """Return the committed losses; each step must occur once."""
        committed = self.of(ev.StepCommitted)
        numbers = [event.step for event in committed]
        assert len(numbers) == len(set(numbers)), f"a step is committed twice: {numbers}"
        assert all(math.isfinite(event.loss) for event in committed)
        return {event.step: event.loss for event in committed}

    def assert_replicas_equal(self) -> None:
        """Check that all workers have the same hash of their whole state after every step."""
        hashes: dict[int, set[str]] = {}
        for applied in self.messages_of(msg.Applied):
            hashes.setdefault(applied.step, set()).add(applied.state_hash)
        assert hashes
        assert {step: found for step, found in hashes.items() if len(found) != 1 or "" in found} == {}

    # ---- the thread ----

    def _run(self) -> None:
        try:
            while self._round():
                pass
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()
            raise

    def _round(self) -> bool:
        ready = self._selector.select(0.05)
        with self._changed:
            for key, _ in ready:
                if key.data is None:
                    self._wake.recv(64)
                else:
                    self._readable(key.data, key.fileobj)
            planned, self._planned = self._planned, []
            for event in (*planned, Tick()):
                if self.over is None:
                    self._do(self.machine.handle(event, time.time()))
            self._changed.notify_all()
            return not self._closing

    def _readable(self, node: _Node, source: Any) -> None:
        now = time.time()
        if source is node.listener:
            node.connection, _ = node.listener.accept()
            self._selector.unregister(node.listener)
            self._selector.register(node.connection, selectors.EVENT_READ, node)
            hello = msg.Hello(
                protocol=msg.PROTOCOL,
                job=JOB,
                node=node.name,
                session=f"{node.number:08x}",
                term=0,
                agent_pid=os.getpid(),
                workers=1,
                digest="",
            )
            self._do(self.machine.handle(Received(node.number, hello), now))
            return
        assert node.connection is not None
        try:
            data = node.connection.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(node.connection)
            self._do(self.machine.handle(Disconnected(node.number), now))
            return
        for message in node.decoder.feed(data):
            self.messages.append(message)
            if node.warms and isinstance(message, msg.Attach):
                self._order(node.number, msg.Warm(term=1))
                if node.warms == "before":
                    node.attach = message
                    continue
            if isinstance(message, msg.Warmed) and node.attach is not None:
                message = node.attach
            posted = isinstance(message, msg.Post)
            wrapped = msg.Posts(posts=(message,)) if posted else msg.FromWorker(message=message)
            self._do(self.machine.handle(Received(node.number, wrapped), now))

    def _do(self, instructions: list[Any]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Persist):
                msgspec.msgpack.encode(instruction.record)
            elif isinstance(instruction, Emit):
                self.events.append(instruction.event)
            elif isinstance(instruction, EndJob):
                self.over = instruction
            elif isinstance(instruction, PlanExperts):
                found = instruction.search.solve()
                adopted = replace(found, adopt=found.experts.moves > 0) if found is not None else None
                self._planned.append(Planned(instruction.search.generation, adopted))
            elif isinstance(instruction, Send) and isinstance(instruction.message, msg.ToWorker):
                self._order(instruction.connection, instruction.message.order)
            elif isinstance(instruction, Send) and isinstance(instruction.message, msg.CheckpointOrder):
                self._order(instruction.connection, instruction.message)
            elif isinstance(instruction, Send):
                self._handle_as_agent(instruction.connection, instruction.message)
            elif isinstance(instruction, Broadcast):
                for number in instruction.connections:
                    self._handle_as_agent(number, instruction.message)

    def _handle_as_agent(self, number: int, message: msg.CoordinatorMessage) -> None:
        """Handle messages about a generation as an agent does."""
        known, node = self._nodes[number].plans, self.machine.members.on(number)
        if isinstance(message, msg.Welcome):
            known.reset_members(message.members)
        elif isinstance(message, msg.NodeOrder) and node is not None:
            for passed in known.on_order(message, tuple(node.workers)):
                assert isinstance(passed, SendToWorkers), f"{node.name} lacks a plan"
                self._order(number, passed.order)

    def _order(self, number: int, order: msg.Order) -> None:
        connection = self._nodes[number].connection
        try:
            if connection is not None:
                connection.sendall(encode_frame(order))
        except OSError:
            return  # The worker died; its Disconnected follows.
