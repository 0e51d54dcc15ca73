"""Schedules detect deliberately broken stores and journals; tests/mutants has broken machines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.coordination.worker.boundaries import InvalidTransitionError
from holdfast.protocol.record import Record
from tests.simulation.cluster import run_plan
from tests.simulation.durable import SimJournal, SimStore
from tests.simulation.faults.plans import FaultPlan, random_plan
from tests.simulation.invariants import InvariantError
from tests.simulation.world import Parts

SEEDS = range(400)


class NothingFenced(SimStore):
    """Writes a record of any version."""

    def swap(self, record: Record, version: int) -> int:
        return super().swap(record, self.version)


class JournalOfAnybody(SimJournal):
    """Appends for any process."""

    def append(self, event: object, length: int) -> int:
        return super().append(event, len(self.events))  # pyright: ignore[reportArgumentType]


class PromisesTooEarly(SimStore):
    """Confirms a write before the record is on disk."""

    def sync(self) -> None:
        pass


class StaysInMemory(SimJournal):
    """Does not wait for the disk."""

    def sync(self) -> None:
        pass


def with_a_power_cut(seed: int) -> FaultPlan:
    return replace(random_plan(seed), crashes=(30 + seed,), power_cuts=True)


BROKEN = {
    "nothing is fenced": (
        Parts(store=NothingFenced, journal=JournalOfAnybody),
        random_plan,
        "superseded coordinator|does not follow|after",
    ),
    "the store promises too early": (
        Parts(store=PromisesTooEarly),
        with_a_power_cut,
        "superseded coordinator|went back|not allowed|does not follow|first event",
    ),
    "the journal stays in memory": (
        Parts(journal=StaysInMemory),
        with_a_power_cut,
        "not on disk when its record was",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_disk_is_caught(name: str) -> None:
    parts, plan_of, caught = BROKEN[name]
    for seed in SEEDS:
        try:
            run_plan(plan_of(seed), parts)
        except (InvariantError, InvalidTransitionError) as error:
            with pytest.raises(type(error), match=caught):
                raise error
            return
    pytest.fail(f"{name} was not detected in {len(SEEDS)} schedules")
