"""The invariants of a pool, checked after every event from outside the machines."""

from __future__ import annotations

from collections import Counter
from typing import NoReturn

from holdfast.coordination.pool.fence import StartGrant
from holdfast.protocol.pool.events import AnyPoolEvent, NodeGranted, RoleChanged
from holdfast.protocol.pool.grants import Held
from holdfast.protocol.pool.record import OVER, Grant, PooledJob, PoolRecord
from tests.simulation.invariants import InvariantError
from tests.simulation.pool.pool_around import CoordinatorSeen, NodeSeen, PoolAround

#: The maximum number of role changes of one grant; more indicate an endless oscillation.
MOST_ROLE_CHANGES = 20


class PoolChecker:
    """Checks one run."""

    def __init__(self, cluster: PoolAround) -> None:
        self._cluster = cluster
        #: Every grant ever written.
        self._written: dict[int, Grant] = {}
        self._submissions: dict[int, int] = {}
        self._newest_on: dict[str, int] = {}
        self._last_seq = 0
        self._role_changes = Counter[int]()
        #: The newest grant started in each life of a node.
        self._started: dict[tuple[str, str], int] = {}
        #: Counters of the events that the schedules covered.
        self.grants = self.moved = self.recalled = self.waited = 0

    def _fail(self, why: str) -> NoReturn:
        raise InvariantError(f"{why}\n" + "\n".join(self._cluster.world.story[-60:]))

    # ---- the pool's record ----

    def persisted(self, before: PoolRecord | None, after: PoolRecord) -> None:
        """Check a record that the pool has written."""
        if before is not None:
            if after.version != before.version + 1 or after.term < before.term:
                self._fail(f"version {after.version} of term {after.term} follows {before.version}, {before.term}")
            for node, grant in before.grants.items():
                now = after.grants.get(node)
                if now is None or now.number != grant.number:
                    self._over(grant)
            self._nobody_below_its_least(before, after)
            self._no_surplus(before, after)
        for node, grant in after.grants.items():
            if grant.number not in self._written:
                if grant.number <= self._newest_on.get(node, 0):
                    self._fail(f"grant {grant.number} on {node} is older than {self._newest_on[node]}")
                self._given(after, grant)
                self._written[grant.number] = grant
                self._submissions[grant.number] = after.jobs[grant.job].submission
                self._newest_on[node] = grant.number
                self.grants += 1
        left = {node for node, grant in after.grants.items() if after.jobs[grant.job].state in OVER}
        if left:
            self._fail(f"nodes {sorted(left)} belong to jobs that have ended")

    def _given(self, after: PoolRecord, grant: Grant) -> None:
        """Check that a granted node is not drained, and that the job has no useless standbys."""
        job = after.jobs[grant.job]
        if after.nodes[grant.node].drained:
            self._fail(f"{grant.node} is drained, but was granted to {grant.job}")
        if not grant.standby:
            return
        self.waited += 1
        waiting = sum(one.job == job.name and one.standby and not one.recalled for one in after.grants.values())
        if job.state != "admitted" or job.spec.preemptible or waiting > max(1, job.spec.recovery.standbys):
            self._fail(f"job {job.name} in state {job.state} has {waiting} standbys")

    def _over(self, grant: Grant) -> None:
        """Check that an ended grant is absent from its job's record, or has no processes on its node."""
        self.moved += 1
        disk = self._cluster.world.job_disks.get((grant.job, self._submissions[grant.number]))
        if disk is not None and grant.number not in disk.held.numbers and disk.held.heard >= grant.version:
            return
        if disk is not None and disk.standing in OVER:
            return
        if not self._on_node(grant):
            return
        self._fail(f"grant {grant.number} of {grant.job} on {grant.node} ended before its job or its node released it")

    def _on_node(self, grant: Grant) -> bool:
        """Return whether a grant has processes on its node, or could still start some."""
        node = self._cluster.nodes.get(grant.node)
        return node is not None and node.session == grant.session and node.fence.ended < grant.number

    def _nobody_below_its_least(self, before: PoolRecord, after: PoolRecord) -> None:
        for name, job in after.jobs.items():
            if job.state != "admitted" or job.spec.preemptible:
                continue
            recalled = [
                node
                for node, grant in after.grants.items()
                if grant.job == name and grant.recalled and node in before.grants and not before.grants[node].recalled
            ]
            recalled = [node for node in recalled if not after.grants[node].standby]
            self.recalled += len(recalled)
            kept = sum(
                1 for grant in after.grants.values() if grant.job == name and not (grant.recalled or grant.standby)
            )
            if recalled and kept < _least(job):
                self._fail(
                    f"{name} must return {recalled} and keeps {kept} nodes, fewer than its minimum of {_least(job)}"
                )

    def _no_surplus(self, before: PoolRecord, after: PoolRecord) -> None:
        """Check that a job with an unchanged share loses no node, because a move inside a job needs no other node.

        A node that is no longer drained or replaced counts again, so the job may have one node too many.
        """
        for name, job in after.jobs.items():
            known = before.jobs.get(name)
            if known is None or known.state != "admitted" or job.state != "admitted":
                continue
            counted = 0
            recalled = list[str]()
            for node, grant in after.grants.items():
                was = before.grants.get(node)
                if grant.job != name or was is None or was.number != grant.number:
                    continue
                spared = was.replaced or before.nodes[node].drained
                spared_now = grant.replaced or after.nodes[node].drained
                counted += spared and not spared_now
                if grant.recalled and not (was.recalled or grant.standby or spared_now):
                    recalled.append(node)
            if len(recalled) > max(0, known.share - job.share) + counted:
                self._fail(f"{name} loses {recalled}, with a share of {known.share} before and {job.share} now")

    def emitted(self, event: AnyPoolEvent) -> None:
        """Check an event that the pool has written to the journal."""
        if isinstance(event, RoleChanged):
            self._role_changes[event.grant] += 1
            if self._role_changes[event.grant] > MOST_ROLE_CHANGES:
                self._fail(f"the role of {event.node} in {event.job} has changed {MOST_ROLE_CHANGES} times")
        if event.seq != self._last_seq + 1:
            self._fail(f"event {event.seq} follows {self._last_seq}")
        self._last_seq = event.seq
        if isinstance(event, NodeGranted) and event.grant not in self._written:
            self._fail(f"grant {event.grant} was announced but is not in the record")

    # ---- jobs and nodes ----

    def held(self, job: CoordinatorSeen, before: Held, after: Held) -> None:
        """Check the grants that a job has written to its record."""
        for node, grant in after.grants.items():
            written = self._written.get(grant.number)
            if written is None or (written.job, written.node) != (job.name, node):
                self._fail(f"{job.name} holds {grant.number} on {node}, which is {written}")
        for number in after.numbers - before.numbers:
            if number in before.returned:
                self._fail(f"{job.name} has returned grant {number} and takes it again")
        self._one_owner(set(after.grants) - set(before.grants))

    def _one_owner(self, nodes: set[str]) -> None:
        """Check that two jobs hold a node only if the older grant has no processes there."""
        for node in nodes:
            holders = {
                disk.held.grants[node].number
                for disk in self._cluster.world.job_disks.values()
                if node in disk.held.grants
            }
            for number in sorted(holders)[:-1]:
                if self._on_node(self._written[number]):
                    self._fail(f"{node} belongs to {len(holders)} jobs: grants {sorted(holders)}")

    def started(self, node: NodeSeen, start: StartGrant) -> None:
        """Check processes that a node has started for a grant."""
        written = self._written.get(start.grant)
        if written is None or (written.job, written.node, written.session) != (start.job, node.name, node.session):
            self._fail(f"{node.name} starts grant {start.grant} of {start.job}, which is {written}")
        life = node.name, node.session
        if start.grant <= self._started.get(life, 0):
            self._fail(f"{node.name} starts grant {start.grant} after {self._started[life]}")
        self._started[life] = start.grant
        if len(node.processes) > 1:
            self._fail(f"{node.name} has processes of grants {sorted(node.processes)}")

    def after_event(self) -> None:
        """Check after each event that no node trains in two jobs."""
        trains: dict[str, str] = {}
        for job in self._cluster.coordinators.values():
            for name in job.members:
                node = self._cluster.nodes.get(name)
                grant = job.disk.held.grants.get(name)
                if node is None or grant is None or grant.number not in node.processes:
                    continue  # The node is gone, but the job does not know this yet.
                if name in trains:
                    self._fail(f"{name} trains in {trains[name]} and in {job.name}")
                trains[name] = job.name

    # ---- the end ----

    def at_the_end(self) -> None:
        """Check that every job has ended, no process runs, and no grant is left."""
        record = self._cluster.world.disk.record
        assert record is not None
        waits = {name: (job.state, job.why) for name, job in record.jobs.items() if job.state not in OVER}
        if waits:
            self._fail(f"jobs have not ended: {waits}, grants {dict(record.grants)}")
        orphans = {node.name: node.processes for node in self._cluster.nodes.values() if node.processes}
        if orphans or record.grants:
            self._fail(
                f"all jobs have ended, but processes or grants are left: {orphans}, grants {dict(record.grants)}"
            )


def _least(job: PooledJob) -> int:
    least = job.spec.nodes_to_begin
    return min((size for size in job.spec.sizes if size >= least), default=least)
