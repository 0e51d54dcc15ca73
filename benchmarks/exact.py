"""Check that failures do not change running statistics or the logged rows.

    make bench-exact
    python benchmarks/exact.py --only buffers

buffers: a model with BatchNorm trains 200 steps with one to four workers. Six nodes are killed in six phases of a step,
and others join. The final state must equal that of the same script alone in one process, bit by bit. The parameters
must also equal those of plain PyTorch; its running statistics differ in their last bits. Gradients are rounded to
multiples of 2**-24, so that float64 sums of them do not depend on the order of addition.

rows: 500 steps log values, with ten faults of four kinds and one killed coordinator. The file of `--metrics-file` must
contain each step once, in order, with the values that follow from its micro-batches.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import holdfast
from holdfast.errors import HoldfastError
from holdfast.protocol.events import (
    CoordinatorRestarted,
    FailureDetected,
    GenerationStarted,
    JobStarted,
    StepCommitted,
)
from tests.harness.local_job import LocalJob

SCALE = 2.0**24
MICRO_BATCHES, MICRO_BATCH, WIDTH = 6, 4, 8
PHASES = ("compute", "reducing", "ready", "voted", "passed", "applying")
BUFFER_STEPS, ROW_STEPS = 200, 500
STEP_S = 0.08
HASHES, ROWS = "hashes", "rows.jsonl"
DEADLINE_S = 60.0


def main() -> int:
    """Run the scenarios; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SCENES, help="run only this scenario")
    parser.add_argument("--seed", type=int, default=1, help="of the choice of victims")
    parser.add_argument(
        "--train",
        metavar="FILE",
        type=Path,
        help="run as the job's script, and append the hash of its state to this file",
    )
    parser.add_argument("--steps", type=int, default=BUFFER_STEPS, help="steps of that script")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="seconds added to each step of that script")
    options = parser.parse_args()
    if options.train is not None:
        train(options.train, options.steps, options.step_seconds)
        return 0
    names = [options.only] if options.only else list(SCENES)
    return 1 if [name for name in names if not SCENES[name](random.Random(options.seed))] else 0


# ---- the trained model ----


def rounded(gradient: torch.Tensor) -> torch.Tensor:
    """Return the nearest multiples of 2**-24."""
    return (gradient * SCALE).round() / SCALE


def make_model() -> nn.Sequential:
    """Return the same model every time, with BatchNorm before, after and between trained layers."""
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType] - torch leaves it untyped
    layers = (nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 16), nn.BatchNorm1d(16, momentum=None), nn.Tanh())
    model = nn.Sequential(*layers, nn.Linear(16, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    for parameter in model.parameters():
        parameter.register_hook(rounded)  # pyright: ignore[reportUnknownMemberType] - likewise
    return model


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of the model."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


class GeneratedData:
    """Data that are a function of step and micro-batch."""

    def batch(self, step: int, micro_batch: int) -> torch.Tensor:
        """Return the samples of a micro-batch."""
        generator = torch.Generator().manual_seed(step * MICRO_BATCHES + micro_batch)
        return torch.randn(MICRO_BATCH, WIDTH, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return a micro-batch's mean loss."""
    return nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True).sin())


def hashes_of(model: nn.Module) -> tuple[str, str]:
    """Return a hash of all parameters, and one of all buffers."""
    return hash_of(dict(model.named_parameters())), hash_of(dict(model.named_buffers()))


def hash_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a hash of the values of named tensors."""
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in tensors.items():
        digest.update(name.encode() + tensor.detach().numpy().tobytes())
    return digest.hexdigest()


def train(path: Path, steps: int, step_s: float) -> None:
    """Run the job's training script."""
    job, data = holdfast.init(), GeneratedData()
    model = make_model()
    job.protect(
        model,
        make_optimizer(model),
        data,
        global_batch=MICRO_BATCHES * MICRO_BATCH,
        micro_batch=MICRO_BATCH,
    )
    for step in job.steps(steps):
        time.sleep(step_s)
        for batch in step.micro_batches():
            step.backward(loss_of(model, batch))
            step.log({"largest": batch.max()}, reduce="max")
        step.log({"workers": 1}, reduce="sum")
        step.apply()
    with path.open("a") as file:
        print(*hashes_of(model), file=file, flush=True)


def plain_hashes(steps: int) -> tuple[str, str]:
    """Return the hashes after training plain PyTorch on the same micro-batches in one process."""
    model, data = make_model(), GeneratedData()
    optimizer = make_optimizer(model)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        for micro_batch in range(MICRO_BATCHES):
            loss_of(model, data.batch(step, micro_batch)).backward()  # pyright: ignore[reportUnknownMemberType]
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1.0 / MICRO_BATCHES)
        optimizer.step()
    return hashes_of(model)


def hashes_alone(steps: int) -> tuple[str, str]:
    """Return the hashes after running the script alone."""
    with tempfile.TemporaryDirectory(prefix="holdfast-") as name:
        path = Path(name) / HASHES
        command = [sys.executable, __file__, "--train", str(path), "--steps", str(steps)]
        subprocess.run(command, check=True)
        parameters, statistics = path.read_text().split()
    return parameters, statistics


# ---- faults ----


class FaultyJob:
    """A job into which faults are injected."""

    def __init__(self, job: LocalJob, rng: random.Random) -> None:
        """Wait until the job trains."""
        self.faults = 0
        self._job, self._rng = job, rng
        job.wait(StepCommitted)

    def inject(self, fault: str, phase: str = "") -> None:
        """Inject a fault into a random node, and wait until training continues."""
        job, since, victim = self._job, len(self._job.events), self._rng.choice(self._job.nodes())
        step = job.all(StepCommitted)[-1].step + 4 if phase else None
        job.inject(fault, victim, step=step, phase=phase)
        job.wait(FailureDetected, since=since, timeout=DEADLINE_S)
        begun = job.wait(GenerationStarted, since=since, timeout=DEADLINE_S)
        job.wait(StepCommitted, lambda event: event.time > begun.time, since=since, timeout=DEADLINE_S)
        self.faults += 1

    def grow_to(self, world: int) -> None:
        """Add nodes until the job has this many workers."""
        job, since = self._job, len(self._job.events)
        job.add_nodes(world - len(job.nodes()))
        job.wait(GenerationStarted, lambda event: event.world_size == world, since=since, timeout=DEADLINE_S)

    def kill_coordinator(self) -> None:
        """Kill the coordinator, and wait until a new one has committed a step."""
        job, since = self._job, len(self._job.events)
        os.kill(job.wait(JobStarted).coordinator_pid, signal.SIGKILL)
        next_one = job.wait(CoordinatorRestarted, since=since, timeout=DEADLINE_S)
        job.wait(StepCommitted, since=since, term=next_one.term, timeout=DEADLINE_S)

    def end(self) -> None:
        """Wait for the end of the job.

        Raises:
            HoldfastError: it has failed.
        """
        if (code := self._job.wait_exit(300)) != 0:
            raise HoldfastError(f"the job has ended with {code}:\n{self._job.story()}")


@contextmanager
def training_job(steps: int) -> Generator[LocalJob]:
    """Yield a training job of four nodes."""
    with tempfile.TemporaryDirectory(prefix="holdfast-") as name:
        folder = Path(name)
        options = ("--nodes", "4", "--allow-faults", "--print", "failed", "--metrics-file", str(folder / ROWS))
        arguments = ("--train", str(folder / HASHES), "--steps", str(steps), "--step-seconds", str(STEP_S))
        with LocalJob(__file__, arguments, options=options, folder=folder) as job:
            yield job


def check_buffers(rng: random.Random) -> bool:
    """Train BatchNorm while the job shrinks from four workers to one and grows again."""
    with training_job(BUFFER_STEPS) as job:
        job_of = FaultyJob(job, rng)
        for phase in PHASES[:3]:
            job_of.inject("kill", phase)
        job_of.grow_to(4)
        for phase in PHASES[3:]:
            job_of.inject("kill", phase)
        job_of.end()
        worlds = [event.world_size for event in job.all(GenerationStarted)]
        steps = [event.step for event in job.all(StepCommitted)]
        found = {tuple(line.split()) for line in (job.folder / HASHES).read_text().splitlines()}
    expected, plain = hashes_alone(BUFFER_STEPS), plain_hashes(BUFFER_STEPS)
    equal = found == {expected} and expected[0] == plain[0]
    whole = steps == list(range(1, BUFFER_STEPS + 1)) and {1, 2, 3, 4} <= set(worlds)
    print(
        f"buffers: {len(steps)} steps (of {BUFFER_STEPS}), {job_of.faults} faults (of 6), worlds {worlds}; parameters "
        f"and buffers {found}, on one process {expected}, parameters of plain PyTorch {plain[0]}: "
        f"{'equal in every bit' if equal else 'WRONG'}"
    )
    return equal and whole


def check_rows(rng: random.Random) -> bool:
    """Compare the values logged by each step, through ten faults and the loss of a coordinator."""
    with training_job(ROW_STEPS) as job:
        job_of = FaultyJob(job, rng)
        for number, phase in enumerate((*PHASES, PHASES[0])):
            job_of.inject("kill", phase)
            job_of.grow_to(4)
            if number == 2:
                job_of.kill_coordinator()
        for fault in ("drop", "exit", "raise"):
            job_of.inject(fault)
        job_of.end()
        found = [json.loads(line) for line in (job.folder / ROWS).read_text().splitlines()]
        deaths = len(job.all(CoordinatorRestarted))
    data = GeneratedData()
    wrong = [row for row in found if row["metrics"].get("largest") != expected_largest(data, row["step"])]
    once = [row["step"] for row in found] == list(range(1, ROW_STEPS + 1))
    good = once and not wrong
    print(
        f"rows: {len(found)} rows (of {ROW_STEPS}), {job_of.faults} faults (of 10), "
        f"{deaths} coordinators killed (of 1): "
        f"{'each step once, in order' if once else 'WRONG steps'}, {len(wrong)} with wrong values"
    )
    return good


def expected_largest(data: GeneratedData, step: int) -> float:
    """Return the value that a step must have logged."""
    return max(data.batch(step, micro_batch).max().item() for micro_batch in range(MICRO_BATCHES))


SCENES: dict[str, Callable[[random.Random], Any]] = {"buffers": check_buffers, "rows": check_rows}

if __name__ == "__main__":
    sys.exit(main())
