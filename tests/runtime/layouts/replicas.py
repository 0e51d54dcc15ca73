"""Replicas of a model in a world of real processes, and a check that a process leaks nothing."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress

import torch
import torch._dynamo  # Import once before the fork; torch's wrappers would import it at their first use.

from holdfast.protocol.layouts.layout import Layout
from holdfast.protocol.plan import Role
from holdfast.runtime.groups.communicator import Communicator, HaltCheck
from holdfast.runtime.layouts.mesh import ReplicaMesh
from tests.harness.local_world import Seat

#: A counter of this process; it starts at the same value in all processes of a world.
_turns = itertools.count(1)


class Connector:
    """Builds the groups of one process's replica repeatedly; all processes build them in the same order."""

    def __init__(self, seat: Seat, layout: Layout) -> None:
        self.seat, self.layout = seat, layout
        self.replica, self.rank = divmod(seat.rank, layout.places)
        stage, place = divmod(self.rank, layout.places)
        self.role = Role(stage=stage, place=place)

    def connect(self, replica: ReplicaMesh, halt: HaltCheck | None = None) -> dict[str, Communicator]:
        """Return a communicator for each dimension."""
        made, turn = {}, next(_turns)
        for number, (dimension, members) in enumerate(replica.connected_ranks.items()):
            # Each group has its own board, because their keys are equal.
            generation = ((turn * 10 + number) * 10 + self.replica) * 10 + members[0]
            place, size = members.index(self.role.place), len(members)
            made[dimension] = self.seat.connect(generation, rank=place, size=size, halt=halt)
        return made


@contextmanager
def replica_of(seat: Seat, layout: Layout) -> Generator[tuple[ReplicaMesh, Connector]]:
    """Yield one connected replica; the world is divided into as many replicas as fit."""
    connector = Connector(seat, layout)
    replica = ReplicaMesh(layout, connector.role, torch.device("cpu"))
    replica.swap(connector.connect(replica))
    yield replica, connector
    seat.meet()
    replica.close()


@contextmanager
def leaving_nothing(seat: Seat) -> Generator[None]:
    """Check that threads and descriptors are the same as before, once the reaper is empty."""
    seat.reaper.add(_Nothing())  # The reaper's thread starts with the first group.
    threads, descriptors = threading.enumerate(), _descriptors()
    yield
    assert seat.reaper.wait_empty(60)
    for thread in threading.enumerate():
        if thread not in threads:
            thread.join(60)  # Threads that waited for a group end shortly after it.
            assert not thread.is_alive(), thread.name
    assert _descriptors() == descriptors


class _Nothing:
    def has_ended(self) -> bool:
        return True

    def destroy(self) -> None:
        """Do nothing, because there is no group."""


def _descriptors() -> set[tuple[str, str]]:
    """Return the open descriptors with their targets."""
    found: set[tuple[str, str]] = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # This skips the descriptor of the listing itself.
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found
