"""Replicas of a model within a world of real processes, and what a process must not leave behind."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress

import torch
import torch._dynamo  # (as torch's wrappers do when they are first used: here once, before processes are forked)

from holdfast.protocol.layouts.layout import Layout
from holdfast.protocol.plan import Role
from holdfast.runtime.groups.communicator import Communicator, HaltCheck
from holdfast.runtime.layouts.mesh import ReplicaMesh
from tests.harness.local_world import Seat

#: of this process; all processes of a world begin alike
_turns = itertools.count(1)


class Connector:
    """Builds the groups of one process's replica again and again; all processes ask in the same order."""

    def __init__(self, seat: Seat, layout: Layout) -> None:
        self.seat, self.layout = seat, layout
        self.replica, self.rank = divmod(seat.rank, layout.places)
        stage, place = divmod(self.rank, layout.places)
        self.role = Role(stage=stage, place=place)

    def connect(self, replica: ReplicaMesh, halt: HaltCheck | None = None) -> dict[str, Communicator]:
        """Return a communicator for each dimension."""
        made, turn = {}, next(_turns)
        for number, (dimension, members) in enumerate(replica.connected_ranks.items()):
            # (a board of its own for each group: their keys are alike)
            generation = ((turn * 10 + number) * 10 + self.replica) * 10 + members[0]
            place, size = members.index(self.role.place), len(members)
            made[dimension] = self.seat.connect(generation, rank=place, size=size, halt=halt)
        return made


@contextmanager
def replica_of(seat: Seat, layout: Layout) -> Generator[tuple[ReplicaMesh, Connector]]:
    """One replica, connected; as many of them as the world has room for."""
    connector = Connector(seat, layout)
    replica = ReplicaMesh(layout, connector.role, torch.device("cpu"))
    replica.swap(connector.connect(replica))
    yield replica, connector
    seat.meet()
    replica.close()


@contextmanager
def leaving_nothing(seat: Seat) -> Generator[None]:
    """Look that threads and descriptors are those of before, once the reaper is empty."""
    seat.reaper.add(_Nothing())  # (its thread is there from the first burial on)
    threads, descriptors = threading.enumerate(), _descriptors()
    yield
    assert seat.reaper.wait_empty(60)
    for thread in threading.enumerate():
        if thread not in threads:
            thread.join(60)  # (those that waited end with their group, a moment later)
            assert not thread.is_alive(), thread.name
    assert _descriptors() == descriptors


class _Nothing:
    def has_ended(self) -> bool:
        return True

    def destroy(self) -> None:
        """There is nothing."""


def _descriptors() -> set[tuple[str, str]]:
    """Return what is open, by number and by what that is."""
    found: set[tuple[str, str]] = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # (of the listing itself)
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found
