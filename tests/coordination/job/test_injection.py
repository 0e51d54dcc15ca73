"""Tests of fault injection: accepted faults and the workers that receive the order."""

from __future__ import annotations

from typing import Any

import pytest
from machinery import Job

from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.inputs import InjectFault
from holdfast.coordination.job.injection import FAULTS, plan_fault
from holdfast.coordination.membership import Membership
from holdfast.errors import BadInputError
from holdfast.protocol.job_spec import ExperimentSpec, JobSpec
from holdfast.protocol.messages.agent import NodeFault, ToWorker

CONFIG = CoordinatorConfig(spec=JobSpec(experiments=ExperimentSpec(allow_faults=True)))


@pytest.fixture
def members() -> Membership:
    job = Job(nodes=2)
    job.start()
    return job.machine.members


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_fault_is_sent_to_the_node_or_to_its_first_worker(members: Membership, fault: str) -> None:
    request = InjectFault(fault, "n1", phase="voted" if fault == "hold" else "", by_s=-5.0)
    _, order = plan_fault(CONFIG, members, request)
    if fault in ("kill", "exit", "freeze", "link-down", "clock-jump"):
        assert order == NodeFault(fault=fault, by_s=-5.0)
    else:
        assert isinstance(order, ToWorker)
        assert order.worker in members.nodes["n1"].workers


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"worker": 0}, "for a whole node"),
        ({"step": 3}, "for a whole node"),
        ({"phase": "voted"}, "for a whole node"),
        ({"by_s": 0.0}, "--by is 0"),
        ({"by_s": 2e9}, r"--by is 2e\+09"),
        ({"by_s": float("nan")}, "--by is nan"),
    ],
)
def test_invalid_clock_jumps_are_refused(members: Membership, options: dict[str, Any], why: str) -> None:
    with pytest.raises(BadInputError, match=why):
        plan_fault(CONFIG, members, InjectFault("clock-jump", "n1", **options))
