"""Schedules that once failed in a run of 100,000."""

from __future__ import annotations

import pytest

from tests.simulation.cluster import SimCluster
from tests.simulation.schedules.enumeration import plan_of
from tests.simulation.schedules.shrinking import failure

FOUND = {
    3_081_931_871: "a node paused while the coordinator is killed continues after its lease with its completed work",
    15_401_393_740: "a group breaks, a pending one is not built in time, and another coordinator takes over",
    16_116_489_972: "as 15401393740, with other faults",
    13_864_079_709: "the journal had an undone and repeated step for a node that was disconnected meanwhile",
    21_396_563_650: "two of four nodes leave, and the others have room for one copy of each expert",
    23_117_135_179: "a node that a standby has replaced is needed again in the same transaction",
    23_569_684_184: "as 23117135179, with a dozen nodes",
    24_751_673_129: "a first node receives a termination notice, and its report arrives after its lease",
    26_464_796_299: "one of three nodes is lost three times, and the job waits for it each time",
    34_207_122_327: "a standby that joins for a draining node leaves itself",
    26_877_671_091: "a coordinator dies while it loses a connected node, which later leaves",
    34_063_469_399: "a standby that joins for a draining node is terminated, and the draining node's process fails",
    34_386_483_723: "a standby has replaced a draining node and is terminated, and the pool recalls the draining node",
    34_776_784_574: "the pool recalls a draining node, and the standby that joins for it is terminated",
    34_949_927_330: "a standby that has replaced a draining node is lost while the draining node is retained",
    34_990_080_465: "a standby that joins for a draining node receives a termination notice and is lost before its end",
    26_038_738_894: "a job waits for lost nodes, but not for a drained one that was lost after it was released",
    35_619_583_934: "the pool recalls a silent member and grants its node again as a standby",
    19_410_357_537: "a newer snapshot is lost, and nodes that hold parts of an older one return",
    26_189_692_483: "a node returns to a coordinator that does not know that it was lost, and replaces another one",
    29_758_884_934: "a moved node becomes a member again before all members have applied its last step",
    41_123_026_888: "a checkpoint was sealed by order of a coordinator that died, and the next one drops it",
    35_055_151_877: "a worker that lost its work computes its full share while the others wait",
    23_520_400_438: "a job that replaces no lost node by a standby waits for a node if only a standby is left",
    21_678_761_740: "a job that has not begun waits for a node that was drained and undrained, and has ended",
    42_582_934_733: "a job whose experts need all its nodes waits for another one if one of them is partitioned",
    28_562_436_228: "the pool recalls nodes that the job needs, and one that replaced a retained node is lost",
}


@pytest.mark.parametrize("number", FOUND, ids=str)
def test_a_schedule_that_once_failed_passes(number: int) -> None:
    assert not failure(SimCluster(plan_of(number)))
