"""The losses and CETT add up to 1 under every scheme."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.planner.reliability.sparing.case import Placement, group_blocks
from holdfast.planner.reliability.sparing.evaluation import evaluate
from holdfast.planner.reliability.sparing.losses import losses
from holdfast.planner.reliability.sparing.recovery import (
    Checkpoint,
    Elastic,
    RecoveryScheme,
    SemiSynchronous,
    Synchronous,
)
from holdfast.planner.reliability.sparing.reference import catalina

CHECKPOINT = Checkpoint(period_seconds=250.0, save_seconds=1.0, detect_seconds=60.0, restart_seconds=360.0)


@pytest.mark.parametrize(
    "scheme",
    [
        Synchronous(checkpoint=CHECKPOINT),
        SemiSynchronous(checkpoint=CHECKPOINT, loss_limit_zones=1),
        Elastic(down_seconds=120.0),
    ],
    ids=lambda scheme: type(scheme).__name__,
)
def test_shares_sum_to_one(scheme: RecoveryScheme) -> None:
    case = replace(catalina(), recovery=scheme)
    for outcome in evaluate(case).strategies:
        shares = [float(share) for _, share in losses(case, outcome).items()]
        assert min(shares) >= 0
        assert sum(shares) + float(outcome.cett) == pytest.approx(1.0)


def test_a_placement_group_takes_whole_blocks_and_strands_the_rest_of_the_last_one() -> None:
    """A group of 512 GPUs used to be refused with blocks of 72, like every size that a block does not divide."""
    case = catalina()
    exact = replace(case, placement=Placement(group_gpus=8 * 72))
    rounded = replace(case, placement=Placement(group_gpus=512))
    whole, part = evaluate(exact).strategies[0], evaluate(rounded).strategies[0]
    assert (whole.strategy.label, group_blocks(rounded.placement, part.strategy)) == ("72/72", 8)
    assert int(part.spare_blocks) == int(whole.spare_blocks)
    assert float(part.cett) == pytest.approx(float(whole.cett) * 512 / 576)
    stranded = float(losses(rounded, part).stranded_blocks) - float(losses(exact, whole).stranded_blocks)
    in_use = (part.blocks - int(part.spare_blocks)) / part.blocks
    assert stranded == pytest.approx(in_use * 64 / 576)
    for outcome in evaluate(rounded).strategies:
        assert sum(float(share) for _, share in losses(rounded, outcome).items()) + float(
            outcome.cett
        ) == pytest.approx(1.0)


def test_the_scheme_changes_the_answer() -> None:
    case = catalina()
    goodput = {}
    for scheme in (
        Synchronous(checkpoint=CHECKPOINT),
        SemiSynchronous(checkpoint=CHECKPOINT, loss_limit_zones=1),
        Elastic(down_seconds=120.0),
    ):
        outcome = evaluate(replace(case, recovery=scheme)).strategies[1]
        goodput[type(scheme).__name__] = float(outcome.goodput_gpus)
    assert goodput["Synchronous"] < goodput["SemiSynchronous"] < goodput["Elastic"]


def test_elastic_recovery_needs_no_spare_blocks_without_placement() -> None:
    case = replace(catalina(), recovery=Elastic(down_seconds=120.0), placement=None)
    assert [int(outcome.spare_blocks) for outcome in evaluate(case).strategies] == [0] * 6
