"""A rank of `benchmarks/plain_job.py`: plain torch on gloo, without unnecessary imports."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import plain_torch
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
WORLD = 4
LAYERS, DIM, HEADS, CONTEXT = 6, 256, 4, 16
#: Micro-batches of each rank per step, and their samples, as in a job of four nodes of `benchmarks/recovery.py`.
MICRO_BATCHES, MICRO_BATCH = 2, 4


class Role(msgspec.Struct, frozen=True, kw_only=True):
    """The start parameters of a worker.

    Without `copy_of` and `sender`, the state is already in the file, or it is initialized if `fresh`.
    """

    folder: str
    port: int
    rank: int
    generation: int
    #: The file to which its state is mapped.
    file: str
    #: A file that is first copied to `file`.
    copy_of: str = ""
    #: The rank that sends the state.
    sender: int | None = None
    fresh: bool = False


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the job at the end of a step."""

    #: The file to which rank 0 writes the state, or "".
    saved: str = ""
    #: The only rank that ends, or None if all ranks end.
    leaver: int | None = None


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A step completed by rank 0."""

    step: int
    time: float
    generation: int


def change_file(folder: str, generation: int) -> Path:
    """Return the file from which a generation's ranks read their change."""
    return Path(folder) / f"change-{generation}"


class Training:
    """A model and its optimizer; their state is one mapped tensor: parameters, moments, and the step."""

    def __init__(self, file: Path, *, fresh: bool) -> None:
        """Use the state in the file, or initialize it if `fresh`."""
        from dense_gpt import GPT, Bytes, read_text

        with torch.device("meta"):
            self.model = GPT(LAYERS, DIM, HEADS, CONTEXT)
        shapes = {name: parameter.shape for name, parameter in self.model.named_parameters()}
        count = sum(shape.numel() for shape in shapes.values())
        self.state = torch.from_file(str(file), shared=True, size=3 * count + 1)
        kinds = [split_views(self.state[place * count : (place + 1) * count], shapes.values()) for place in range(3)]
        self.model.load_state_dict(dict(zip(shapes, kinds[0], strict=True)), assign=True)
        if fresh:
            torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType] - torch leaves it untyped
            self.model.load_state_dict(GPT(LAYERS, DIM, HEADS, CONTEXT).state_dict())
            self.state[count:] = 0.0
        #: The gradients of all parameters, and one more number: whether any rank ends the generation.
        self.reduced = torch.zeros(count + 1)
        self.optimizer = plain_torch.adamw(self.model.parameters())
        gradients = split_views(self.reduced[:-1], shapes.values())
        for parameter, first, second, gradient in zip(self.model.parameters(), *kinds[1:], gradients, strict=True):
            self.optimizer.state[parameter] = {"step": torch.zeros(()), "exp_avg": first, "exp_avg_sq": second}
            parameter.grad = gradient
        self._data = Bytes(read_text(None), CONTEXT)

    @property
    def number(self) -> int:
        """The step of the current state."""
        return int(self.state[-1])

    def restore_step_counts(self) -> None:
        """Set the optimizer's step counts to the step of the current state."""
        for moments in self.optimizer.state.values():
            moments["step"].fill_(float(self.number))

    def step(self, rank: int, *, ends: bool) -> bool:
        """Run a step; return whether any rank ends the generation after it."""
        from dense_gpt import loss_of

        self.reduced.zero_()
        for part in range(MICRO_BATCHES):
            place = ((self.number * WORLD + rank) * MICRO_BATCHES + part) * MICRO_BATCH
            pairs = [self._data[(place + one) % len(self._data)] for one in range(MICRO_BATCH)]
            batch = torch.stack([one for one, _ in pairs]), torch.stack([other for _, other in pairs])
            torch.autograd.backward(loss_of(self.model, batch) / (MICRO_BATCHES * WORLD))
        self.reduced[-1] = float(ends)
        plain_torch.all_reduce(self.reduced)
        gradients = self.reduced[:-1]
        gradients *= torch.clamp(1.0 / (gradients.square().sum().sqrt() + 1e-6), max=1.0)
        self.optimizer.step()
        self.state[-1] += 1.0
        return bool(self.reduced[-1] > 0)


def split_views(flat: torch.Tensor, shapes: Iterable[torch.Size]) -> list[torch.Tensor]:
    """Return consecutive parts of a flat tensor in these shapes."""
    found: list[torch.Tensor] = []
    place = 0
    for shape in shapes:
        found.append(flat[place : place + shape.numel()].view(shape))
        place += shape.numel()
    return found


def work(role: Role) -> None:
    """Train until this rank ends; exit without cleaning up, which would cost time."""
    file = Path(role.file)
    if role.copy_of:
        shutil.copyfile(role.copy_of, file)
    training = Training(file, fresh=role.fresh)
    generation, receives = role.generation, role.sender is not None
    while True:
        group = f"generation-{generation}"
        plain_torch.join_group(plain_torch.tcp_store("127.0.0.1", role.port, group), rank=role.rank, world=WORLD)
        change = _previous_change(role, generation)
        if receives:
            assert role.sender is not None
            plain_torch.receive(training.state, role.sender)
        elif change is not None and change.leaver is not None and role.rank == (change.leaver + 1) % WORLD:
            plain_torch.send(training.state, change.leaver)
        training.restore_step_counts()
        change = _train(training, role, generation)
        if change.saved and role.rank == 0:
            training.state.numpy().tofile(f"{change.saved}.partial")
            os.rename(f"{change.saved}.partial", change.saved)
        if change.leaver in (None, role.rank):
            os._exit(0)
        plain_torch.leave_group()
        generation, receives = generation + 1, False


def _previous_change(role: Role, generation: int) -> Change | None:
    """Return the change that ended the previous generation, or None if this rank was not part of it."""
    if generation == role.generation:
        return None
    return _read(role.folder, generation - 1)


def _read(folder: str, generation: int) -> Change:
    return msgspec.json.decode(change_file(folder, generation).read_bytes(), type=Change)


def _train(training: Training, role: Role, generation: int) -> Change:
    """Run steps until there is a change of the job; return it."""
    change = change_file(role.folder, generation)
    with (Path(role.folder) / "rows").open("ab", buffering=0) as rows:
        while True:
            ends = training.step(role.rank, ends=role.rank == 0 and change.exists())
            if role.rank == 0:
                row = Row(step=training.number, time=time.time(), generation=generation)
                rows.write(msgspec.json.encode(row) + b"\n")
            if ends:
                return _read(role.folder, generation)


def main() -> None:
    """Run the worker of a role given in JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", help="the role in JSON, written by benchmarks/plain_job.py")
    work(msgspec.json.decode(parser.parse_args().role, type=Role))


if __name__ == "__main__":
    main()
