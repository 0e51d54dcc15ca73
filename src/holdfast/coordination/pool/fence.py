"""A node's side of its grants, the fence: it starts a grant once no process of the previous grant is left.

The agent's shell starts and ends processes as instructed here, and reports when no process of a grant is left. All of
them die with the agent, so a new agent process starts with an empty node.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.protocol.messages.pool import NodeGrant, NodeState


@dataclass(frozen=True, slots=True)
class StartGrant:
    """Start the processes of a grant: the node belongs to the job."""

    grant: int
    job: str
    submission: int
    standby: bool = False


@dataclass(frozen=True, slots=True)
class ReapGrant:
    """End all processes of a grant; call `Fence.on_reaped` once none is left."""

    grant: int


@dataclass(frozen=True, slots=True)
class ReportState:
    """Send the node's state to the pool, if it is connected."""

    state: NodeState


FenceInstruction = StartGrant | ReapGrant | ReportState
_NO_GRANT = NodeGrant(term=0, version=0)


class Fence:
    """Decides which grant may run on the node."""

    def __init__(self) -> None:
        #: the grant with processes on this node, or 0
        self.running = 0
        #: No process of grants up to this one is left, and none will be started.
        self.ended = 0
        self._reaping = False
        self._changes = 0
        self._newest = _NO_GRANT

    @property
    def state(self) -> NodeState:
        """The node's state, as reported to the pool."""
        return NodeState(runs=self.running, ended=self.ended, changes=self._changes)

    @property
    def record_version(self) -> tuple[int, int]:
        """Term and version of the newest pool record that the node has received."""
        return self._newest.term, self._newest.version

    @property
    def pool_identity(self) -> str:
        """Identity of the pool that sent that record, or "" before the first."""
        return self._newest.identity

    def on_grant(self, grant: NodeGrant) -> list[FenceInstruction]:
        """Handle the pool's message about the owner of the node: return instructions to start the granted job's
        processes, or first to end others.

        Return [] if a newer message was received, or if the grant already runs or has ended.
        """
        if (grant.term, grant.version) < (self._newest.term, self._newest.version):
            return []
        self._newest = grant
        return self._apply_grant()

    def on_reaped(self, grant: int) -> list[FenceInstruction]:
        """Handle that no process of a grant is left, whether the pool, the job or the processes ended it: report it,
        and start the newest grant.

        Ignore other grants than the running one.
        """
        if grant != self.running:
            return []
        self.running = 0
        self.ended = grant
        self._reaping = False
        return [ReportState(self.state), *self._apply_grant()]

    def on_node_changed(self) -> list[FenceInstruction]:
        """Report that the node has changed: jobs that refused it may accept it now."""
        self._changes += 1
        return [ReportState(self.state)]

    def _apply_grant(self) -> list[FenceInstruction]:
        """Return the instructions that lead to the newest grant: end the processes of another one, or start them and
        report that.

        Empty if it runs, has ended, or processes are being ended.
        """
        newest = self._newest
        if self.running:
            if newest.grant == self.running or self._reaping:
                return []
            self._reaping = True
            return [ReapGrant(self.running)]
        if newest.grant <= self.ended:
            return []  # No job has the node, or the grant has ended.
        self.running = newest.grant
        return [StartGrant(newest.grant, newest.job, newest.submission, newest.standby), ReportState(self.state)]
