"""A worker without torch: the real phase machine, and collectives made of files.

Every rank creates a file for the step and continues once all others have. A step is a barrier, so members are never
more than one step apart, as with real collectives. It needs no coordinator.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from pathlib import Path

from holdfast.control.link.worker_link import WorkerLink
from holdfast.control.link.worker_settings import WorkerSettings
from holdfast.coordination.worker import tasks as w
from holdfast.coordination.worker.machine import WorkerMachine
from holdfast.errors import BadInputError
from holdfast.protocol.commit import Commit
from holdfast.protocol.messages.orders import AcceptCheckpoint, Inject, Order, Posted, PruneCheckpoints
from holdfast.protocol.messages.worker import Attach
from holdfast.protocol.plan import GenerationPlan
from holdfast.step_samples import StepSamples

GLOBAL_BATCH = 8
MICRO_BATCHES = 4
SAMPLES = StepSamples(seed=0, micro_batches=MICRO_BATCHES, micro_batch=GLOBAL_BATCH // MICRO_BATCHES)


class Training:
    """One worker's thread shell around the machine."""

    def __init__(self, settings: WorkerSettings, steps: int, step_s: float) -> None:
        self.settings = settings
        self.steps = steps
        self.step_s = step_s
        self.machine = WorkerMachine(settings.worker, samples=SAMPLES)
        self.link = WorkerLink(settings.socket)
        self.changed = threading.Condition()
        # Agents that share a script share this folder, which is next to their sockets.
        self.meeting = Path(settings.socket).parent / "meeting"
        self.poisoned = False

    def attach(self) -> None:
        self.link.start(self.on_order, lambda: os._exit(1))
        self.link.send(
            Attach(
                worker=self.settings.worker,
                pid=os.getpid(),
                host="127.0.0.1",
                state_port=1,
                config={"model": "same"},
                global_batch=GLOBAL_BATCH,
                micro_batches=MICRO_BATCHES,
            )
        )

    def on_order(self, order: Order) -> None:
        with self.changed:
            match order:
                case Inject(fault="raise"):
                    self.poisoned = True
                case Inject():
                    os._exit(13)
                case Posted() | AcceptCheckpoint() | PruneCheckpoints():
                    pass
                case _:
                    self.obey(self.machine.on_order(order))
            self.changed.notify_all()

    def obey(self, instructions: list[w.WorkerInstruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, w.SendToCoordinator):
                self.link.send(instruction.message)
            elif isinstance(instruction, w.Build) and instruction.pending:
                self.obey(self.machine.on_group_ready(instruction.plan.generation))

    def train(self) -> None:
        while True:
            with self.changed:
                if self.poisoned:
                    raise RuntimeError("injected: raise")
                task = self.machine.task
                if isinstance(task, w.Done):
                    return
                if isinstance(task, w.Entering):
                    self.enter(task)
                elif isinstance(task, w.Compute) and task.step <= self.steps:
                    self.step(task)
                elif isinstance(task, w.Compute):
                    self.obey(self.machine.finish())
                else:
                    self.changed.wait()

    def enter(self, task: w.Entering) -> None:
        machine = self.machine
        match task:
            case w.Forward():
                if machine.begin_apply():
                    self.obey(machine.finish_apply())
            case w.Receive():
                assert machine.generations.decision is not None
                if machine.begin_adoption(task.plan.generation):
                    self.obey(machine.finish_receive((), machine.generations.decision.applied))
            case w.Enter():
                self.obey(machine.finish_entering())
            case _:
                raise RuntimeError(f"there is nothing to load or to move: {task}")

    def meet(self, plan: GenerationPlan, key: str) -> bool:
        """Wait until all members have reached this point; return False if a Stop comes first."""
        folder = self.meeting / f"{plan.generation}-{key}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / str(self.machine.generations.rank)).touch()
        while len(os.listdir(folder)) < len(plan.members) and not self.machine.frozen:
            self.changed.wait(0.002)
        return not self.machine.frozen

    def step(self, task: w.Compute) -> None:
        machine = self.machine
        plan = machine.plan
        assert plan is not None
        self.changed.wait_for(lambda: machine.frozen or machine.generation != plan.generation, self.step_s)
        if machine.generation != plan.generation:
            return  # A Stop and a Begin came during one wait, so this step is no longer current.
        for micro_batch in task.micro_batches:
            if not machine.begin_micro_batch(micro_batch):
                return
        # There are no joins here: the barrier carries no values, so the swap flag is never raised.
        commit = Commit(
            grad_square=1.0,
            loss_sum=GLOBAL_BATCH / task.step,
            samples=GLOBAL_BATCH,
            nonfinite=0,
            sample_hashes=SAMPLES.expected(task.step),
        )
        if not machine.begin_reduction():
            return
        self.obey(machine.finish_reduction(commit))
        if not machine.begin_vote():
            return
        if not self.meet(plan, f"step-{task.step}"):
            self.obey(machine.abandon_vote())
            return
        self.obey(machine.pass_vote(commit))
        if machine.begin_apply():
            self.obey(machine.finish_apply())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--crash", default="", help="bad-input, exception, exit, or silent, before attaching")
    parser.add_argument("--tail", type=int, default=0, help="exit code after the job is done")
    options = parser.parse_args()
    settings = WorkerSettings.from_environment(os.environ)
    assert settings is not None
    if options.crash == "bad-input":
        raise BadInputError("global_batch is 7: it must be a multiple of micro_batch 2")
    if options.crash == "exception":
        raise RuntimeError("out of luck")
    if options.crash == "exit":
        sys.exit(7)
    if options.crash == "silent":
        return
    training = Training(settings, options.steps, options.step_s)
    training.attach()
    training.train()
    training.link.close()
    sys.exit(options.tail)


if __name__ == "__main__":
    main()
