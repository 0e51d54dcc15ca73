"""Parcels between members: each receives the others' parcels, complete and of the right step, or refuses them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from holdfast.control.link.wire import TransferError
from holdfast.protocol.plan import GenerationPlan, Member
from holdfast.runtime.state import tree
from holdfast.runtime.state.parcels import AT_ONCE, Parcels
from holdfast.runtime.state.receive import StateInbox, StateReceiver
from holdfast.runtime.state.state import Manifest, StateMismatchError, StateView, TensorSpec
from holdfast.runtime.state.wire import PARCEL, STATE, Offer, Ticket

DEADLINE_S = 30.0
NOTHING = tree.pack(None, None, "nothing")


class Cargo:
    """The data of one member, which sends each other member its own tensor."""

    def __init__(self, rank: int, world: int, numbers: int) -> None:
        self.rank = rank
        self.receivers = self.senders = [other for other in range(world) if other != rank]
        self.numbers = numbers
        self.here: dict[int, torch.Tensor] = {}

    def view(self, to: int) -> StateView:
        tensor = torch.full((self.numbers,), 100 * self.rank + to, dtype=torch.int64)
        return StateView(manifest=self.manifest(self.rank, to), tensors=[tensor])

    def prepare(self, source: int, manifest: Manifest) -> list[torch.Tensor]:
        if manifest != self.manifest(source, self.rank):
            raise StateMismatchError("something else was sent")
        return [torch.zeros(self.numbers, dtype=torch.int64)]

    def on_received(self, source: int, tensors: Sequence[torch.Tensor]) -> None:
        self.here[source] = tensors[0]

    def manifest(self, source: int, to: int) -> Manifest:
        spec = TensorSpec(f"{source} to {to}", "int64", (self.numbers,), host=True)
        return Manifest(tensors=(spec,), parameters=0, buffers=0, optimizer=NOTHING, extra={})


class Crew:
    """A world of members in this process, each with its own inbox."""

    def __init__(self, world: int, *, numbers: int = 1 << 18, steps: Sequence[int] = (), secret: bytes = b"s") -> None:
        self.changed = threading.Condition()
        self.errors: list[str] = []
        self.parcels: list[Parcels] = []
        self.doors = [
            StateInbox("127.0.0.1", admit=self._admit(rank), open_receiver=self._open(rank)) for rank in range(world)
        ]
        members = tuple(
            Member(worker=f"n{rank}/0/a", host="127.0.0.1", state_port=door.start())
            for rank, door in enumerate(self.doors)
        )
        self.plan = GenerationPlan(term=1, generation=4, members=members, secret=secret)
        self.cargo = [Cargo(rank, world, numbers) for rank in range(world)]
        for rank, cargo in enumerate(self.cargo):
            one = Parcels(
                cargo,
                plan=self.plan,
                worker=self.plan.workers[rank],
                step=steps[rank] if steps else 7,
                on_error=self._failed,
                notify=self._notify,
            )
            self.parcels.append(one)

    def wait(self, ready: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(ready, timeout=DEADLINE_S)

    def close(self) -> None:
        for one in self.parcels:
            one.abort()
        for door in self.doors:
            door.close()

    def _notify(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def _failed(self, error: str, _receiver: str) -> None:
        self.errors.append(error)
        self._notify()

    def _admit(self, rank: int) -> Callable[[Offer, float], Ticket | None]:
        def admit(offer: Offer, _wait_s: float) -> Ticket | None:
            known = offer.kind == PARCEL and offer.generation == self.plan.generation
            return self.parcels[rank].make_ticket(offer.sender) if known else None

        return admit

    def _open(self, rank: int) -> Callable[[Ticket], StateReceiver | None]:
        return lambda ticket: self.parcels[rank].open_receiver(ticket)


@pytest.fixture
def crews() -> Iterator[list[Crew]]:
    made: list[Crew] = []
    yield made
    for crew in made:
        crew.close()


def test_every_member_receives_the_parcels_of_all_others(crews: list[Crew]) -> None:
    world = AT_ONCE + 2  # There are more receivers than a member sends to at once.
    crew = Crew(world)
    crews.append(crew)
    assert all(one.is_receiving and not one.has_ended and not one.sent for one in crew.parcels)
    for one in crew.parcels:
        one.start()
    crew.wait(lambda: all(one.sent and one.has_ended for one in crew.parcels) or bool(crew.errors))
    assert not crew.errors
    for rank, (one, cargo) in enumerate(zip(crew.parcels, crew.cargo, strict=True)):
        one.hand_over()
        assert not one.is_receiving, "the parcels must be handed over only once"
        assert sorted(cargo.here) == list(cargo.senders)
        assert all((tensor == 100 * source + rank).all() for source, tensor in cargo.here.items())
        assert one.nbytes == (world - 1) * cargo.numbers * 8


def test_a_parcel_of_another_step_is_refused(crews: list[Crew]) -> None:
    crew = Crew(2, steps=(7, 8))
    crews.append(crew)
    for one in crew.parcels:
        one.start()
    crew.wait(lambda: all(one.has_ended for one in crew.parcels))
    with pytest.raises(TransferError, match="step 8, not of 7"):
        crew.parcels[0].hand_over()
    assert not crew.cargo[0].here


def test_both_sides_report_a_parcel_that_does_not_match(crews: list[Crew]) -> None:
    crew = Crew(2)
    crews.append(crew)
    crew.cargo[1].manifest = lambda source, to: Cargo.manifest(crew.cargo[0], to, source)  # pyright: ignore
    crew.parcels[0].start()
    crew.wait(lambda: crew.parcels[1].has_ended and bool(crew.errors))
    with pytest.raises(TransferError, match="something else was sent"):
        crew.parcels[1].hand_over()
    assert "could not be sent" in crew.errors[0]


def test_a_member_that_aborts_receives_no_further_parcels(crews: list[Crew]) -> None:
    crew = Crew(2)
    crews.append(crew)
    crew.parcels[1].abort()
    assert crew.parcels[1].has_ended
    crew.parcels[0].start()
    crew.wait(lambda: bool(crew.errors))
    assert not crew.parcels[0].sent
    with pytest.raises(TransferError, match="broken off"):
        crew.parcels[1].hand_over()


def test_parcels_and_states_are_authenticated_by_different_proofs(crews: list[Crew]) -> None:
    crew = Crew(2)
    crews.append(crew)
    parcel = crew.parcels[0].make_ticket(1)
    assert parcel is not None
    assert (parcel.sender, parcel.receiver, parcel.kind) == ("n1/0/a", "n0/0/a", PARCEL)
    state = Ticket(plan=parcel.plan, sender=parcel.sender, receiver=parcel.receiver)
    assert state.kind == STATE
    assert parcel.make_proof("sender", 0, b"n") != state.make_proof("sender", 0, b"n")
    assert crew.parcels[0].make_ticket(0) is crew.parcels[0].make_ticket(9) is None, (
        "no other member has a parcel for this one"
    )
