"""FSDP2, tensor parallelism, and both, on a replica's mesh: results equal a serial run.

Each collective of a step is abandoned once, and the step repeated on new connections with the same bits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from left_passes import replica_norm, restart
from replicas import Connector, leaving_nothing, replica_of
from sharded_gpt import batch, gpt, loss_sum, optimizer_of, shard
from torch.distributed.tensor import DTensor

from holdfast.protocol.layouts.layout import Layout
from holdfast.runtime.dtensor.local import local_of
from holdfast.runtime.groups.communicator import CollectiveLeftError, Communicator, HaltedError, Pending
from holdfast.runtime.layouts.mesh import ReplicaMesh
from holdfast.runtime.layouts.sharded import disable_gradient_division
from tests.harness.local_world import Seat, run_world

SAMPLES = 8
CLIP = 5.0
LAYOUTS = (Layout(shard=2), Layout(shard=4), Layout(tensor=2), Layout(shard=2, tensor=2))


class Training:
    """A replica's model in training."""

    def __init__(self, replica: ReplicaMesh, dtype: torch.dtype = torch.float64) -> None:
        self.replica = replica
        self.model = shard(gpt(dtype), replica.mesh)
        self.optimizer = optimizer_of(self.model)
        disable_gradient_division(self.model)
        self.at = replica.layout.coordinates(replica.role.place)

    def step(self, number: int) -> tuple[float, float]:
        """Run a step; return this shard's loss and the norm of the whole gradient."""
        mine = batch(number, SAMPLES).chunk(self.replica.layout.shard)[self.at["shard"]]
        self.optimizer.zero_grad()
        loss = loss_sum(self.model, mine)
        loss.backward()
        gradients = [one.grad for one in self.model.parameters()]
        norm = replica_norm(gradients, self.replica)
        for gradient in gradients:
            local_of(gradient).mul_(min(1.0, CLIP / (norm + 1e-6)))  # torch clips with the same formula.
        self.optimizer.step()
        return loss.item(), norm

    def state(self) -> list[torch.Tensor]:
        """Return a copy of all local tensors."""
        return [one.clone() for one in self._tensors()]

    def _tensors(self) -> list[torch.Tensor]:
        parameters = list(self.model.parameters())
        return [
            local_of(one).detach()
            for one in (*parameters, *(self.optimizer.state[p]["momentum_buffer"] for p in parameters))
        ]

    def put_back(self, state: list[torch.Tensor]) -> None:
        """Restore the local tensors, including momenta, which exist after the first step."""
        for one, before in zip(self._tensors(), state, strict=True):
            one.copy_(before)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def check_against_serial(training: Training, dtype: torch.dtype, tolerance: float) -> None:
    serial = gpt(dtype)
    optimizer = optimizer_of(serial)
    for step in range(3):
        losses = torch.zeros(1, dtype=torch.float64)
        losses[0], norm = training.step(step)
        dist.all_reduce(losses, group=training.replica.mesh.get_group("shard"))
        optimizer.zero_grad()
        loss = loss_sum(serial, batch(step, SAMPLES))
        loss.backward()
        expected = float(torch.nn.utils.clip_grad_norm_(serial.parameters(), CLIP))
        optimizer.step()
        assert losses.item() == pytest.approx(loss.item(), rel=tolerance)
        assert norm == pytest.approx(expected, rel=tolerance)
    for (name, ours), theirs in zip(training.model.named_parameters(), serial.parameters(), strict=True):
        torch.testing.assert_close(whole(ours), theirs.detach(), rtol=tolerance, atol=tolerance, msg=name)


def check_counted(training: Training) -> None:
    """Check that every element counts once, even if several ranks have it."""
    ones = [torch.ones_like(tensor) for tensor in training.model.parameters()]
    norm = replica_norm(ones, training.replica)
    assert norm**2 == pytest.approx(sum(one.numel() for one in gpt().parameters()), rel=1e-12)


def training_body(seat: Seat) -> None:
    """One world trains in all layouts, one after the other."""
    with leaving_nothing(seat):
        for layout in LAYOUTS:
            with replica_of(seat, layout) as (replica, _):
                training = Training(replica)
                check_counted(training)
                check_against_serial(training, torch.float64, 1e-12)
                del training
        with replica_of(seat, Layout(shard=2)) as (replica, _):  # In float32, FSDP2 reduces with a factor.
            check_against_serial(Training(replica, torch.float32), torch.float32, 1e-4)


def test_a_sharded_replica_trains_like_one_process():
    run_world(4, training_body)


class Counted(Communicator):
    """Counts the collectives that start, and calls a function instead of one of them."""

    def __init__(self, inner: Communicator, count: Callable[[], None]) -> None:
        super().__init__(rank=inner.rank, size=inner.size, generation=inner.generation, halt=inner.halted)
        self._inner, self._count = inner, count
        self.retire, self.sever, self._poll_until_done, self._on_ended = (
            inner.retire,
            inner.sever,
            inner._poll_until_done,
            inner._on_ended,
        )

    def start_all_to_all(self, *arguments, **options) -> Pending:
        self._count()
        return self._inner.start_all_to_all(*arguments, **options)

    def start_all_gather(self, *arguments) -> Pending:
        self._count()
        return self._inner.start_all_gather(*arguments)


class Disturbed:
    """Connections on which one rank leaves at its n-th collective; another thread then halts the others."""

    def __init__(self, connector: Connector, replica: ReplicaMesh, at: int | None) -> None:
        self.seat, self.started, self.at = connector.seat, 0, at
        self.halt, self.halted_at = threading.Event(), 0.0
        made = connector.connect(replica, self.halt.is_set)
        replica.swap({dimension: Counted(one, self._count) for dimension, one in made.items()})
        self._listener = threading.Thread(target=self._listen, daemon=True)
        if at is None:
            self._listener.start()

    def _count(self) -> None:
        self.started += 1
        if self.started == self.at:
            self._listen()
            raise HaltedError("generation 0 was halted here")

    def _listen(self) -> None:
        self.seat.meet()
        self.halted_at = time.monotonic()
        self.halt.set()

    def end(self) -> None:
        if self.at is None:
            self._listener.join()


def collectives_of_a_step(training: Training, connector: Connector) -> int:
    undisturbed = Disturbed(connector, training.replica, 1 << 30)
    training.step(2)
    return undisturbed.started


def check_left_and_redone(training: Training, connector: Connector, at: int, expected: list[torch.Tensor]) -> float:
    """Abandon one rank's collective of step 2, and repeat the step; return how long leaving took here."""
    seat, replica = connector.seat, training.replica
    before = training.state()
    victim = seat.rank % replica.layout.places == at % replica.layout.places
    disturbed, took = Disturbed(connector, replica, at if victim else None), 0.0
    try:
        training.step(2)
        # A rank that shares neither a shard nor a tensor group with the victim may finish the step.
        assert replica.layout.tensor > 1
        training.put_back(before)
    except CollectiveLeftError:
        took = time.monotonic() - disturbed.halted_at
    disturbed.end()
    # Severing must wait, because a rank that is not halted yet would report a broken connection as a failure.
    seat.meet()
    replica.retire_communicators()
    restart(training.model, replica)
    replica.swap(connector.connect(replica))
    training.step(2)
    assert all(torch.equal(a, b) for a, b in zip(training.state(), expected, strict=True)), at
    training.put_back(before)
    return took


def left_body(seat: Seat, layouts: tuple[Layout, ...], every: int) -> list[float]:
    took: list[float] = []
    with leaving_nothing(seat):
        for layout in layouts:
            with replica_of(seat, layout) as (replica, connector):
                training = Training(replica)
                for step in range(2):
                    training.step(step)
                before = training.state()
                collectives = collectives_of_a_step(training, connector)
                expected = training.state()
                training.put_back(before)
                assert collectives > 8
                for at in range(1, collectives + 1, every):
                    took.append(check_left_and_redone(training, connector, at, expected))
                del training
    return took


@pytest.mark.parametrize(
    ("layouts", "every"),
    [((Layout(shard=2), Layout(tensor=2)), 1), ((Layout(shard=2, tensor=2),), 5)],
    ids=("two", "two by two"),
)
def test_a_step_abandoned_at_any_point_is_redone_bit_identically(layouts, every):
    took = [seconds for each in run_world(layouts[0].places, left_body, layouts, every) for seconds in each]
    assert max(took) < 10.0
