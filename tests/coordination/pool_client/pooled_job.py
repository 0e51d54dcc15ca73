"""A driver for a pool's job with two nodes and a standby from the pool's reserve."""

from __future__ import annotations

from typing import Any

import msgspec
from machinery import Job, attach, hello, w

from holdfast.coordination.inputs import PoolSaid
from holdfast.coordination.instructions import SendToPool
from holdfast.protocol.job_spec import JobSpec
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.pool.grants import Held
from holdfast.protocol.pool.sharing import JobShares, JobState


class Reserved(Job):
    """Drives a job with nodes n0 and n1 (grants 1 and 2) and the standby s0 (grant 3)."""

    version = 0

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.role_versions: dict[str, int] = {}

    def shares(
        self,
        *,
        leaving: tuple[int, ...] = (),
        standbys: tuple[int, ...] = (3,),
        called: tuple[str, ...] = (),
        **grants: int,
    ) -> None:
        """Send the pool's grants to the job. `called`: nodes with a role decided by this version."""
        self.version += 1
        self.role_versions |= dict.fromkeys(called, self.version)
        grants = grants or {"n0": 1, "n1": 2, "s0": 3}
        said = JobShares(
            term=1,
            version=self.version,
            submission=1,
            grants=grants,
            leaving=frozenset(leaving),
            standbys=frozenset(standbys),
            role_versions={node: self.role_versions.get(node, 1) for node in grants},
        )
        self.feed(PoolSaid(said))

    def comes(self, node: str, grant: int, *, standby: bool = False) -> None:
        self.connect(msgspec.structs.replace(hello(node), grant=grant, standby=standby))
        self.deliver(attach(w(node)))

    def train(self, *, warm: bool = True, steps: int = 1) -> Reserved:
        self.boot()
        self.shares()
        for node, grant in (("n0", 1), ("n1", 2)):
            self.comes(node, grant)
        self.comes("s0", 3, standby=True)
        for node in ("n0", "n1"):
            self.deliver(msg.Entered(worker=w(node), generation=1, applied=0))
        if warm:
            self.deliver(msg.Warmed(worker=w("s0"), seconds=0.5))
        for step in range(1, steps + 1):
            self.step(step, "n0", "n1")
        return self

    @property
    def reports(self) -> list[JobState]:
        return [one.stands for one in self.last if isinstance(one, SendToPool)]

    @property
    def held(self) -> Held:
        held = self.machine.record.held
        assert held is not None
        return held

    @property
    def members(self) -> tuple[str, ...]:
        plan = self.machine.record.plan
        assert plan is not None
        return plan.workers


def reserved(**spec: Any) -> Reserved:
    return Reserved(nodes=2, submission=1, spec=JobSpec(**spec))
