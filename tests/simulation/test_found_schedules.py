"""Schedules that once failed in a run of 100,000."""

from __future__ import annotations

import pytest

from tests.simulation.cluster import SimCluster
from tests.simulation.schedules.enumeration import plan_of
from tests.simulation.schedules.shrinking import failure

FOUND = {
    3_081_931_871: "a node was stopped while the coordinator was killed, and comes back after a lease with what it did",
    15_401_393_740: "a group breaks, a pending one is not built in time, and another coordinator takes over",
    16_116_489_972: "the same, with other faults",
    13_864_079_709: "a step that was undone and done again was in the journal for a node that was away meanwhile",
    21_396_563_650: "two of four nodes leave, and the others have room for one copy of each expert",
    23_117_135_179: "a node that has given its place away is needed again in the same turn",
    23_569_684_184: "the same, with a dozen nodes",
    24_751_673_129: "a first node is told to end, and its word of that comes after its lease",
    26_464_796_299: "one of three nodes is lost three times, and the job waits for it each time",
    34_207_122_327: "a standby that joins for a leaver leaves itself",
    26_877_671_091: "a coordinator goes down as it loses a node that is there, and later leaves",
    34_063_469_399: "a standby that joins for a leaver is told to end, and the leaver's process fails",
    34_386_483_723: "a standby has a leaver's place, is told to end, and the pool recalls the leaver",
    34_776_784_574: "the pool recalls a leaver, and the standby that joins for it is told to end",
    34_949_927_330: "a standby that has taken the place of a leaver is lost while the leaver is owed",
    34_990_080_465: "a standby that joins for a leaver is told to end, and lost before that",
    35_055_151_877: "who has lost its work computes a whole share while those who have kept theirs wait",
}


@pytest.mark.parametrize("number", FOUND, ids=str)
def test_a_schedule_that_once_failed_holds(number: int) -> None:
    assert not failure(SimCluster(plan_of(number)))
