"""A node's side of its grants: the fence. What belongs to a grant is started once everything of the one before is gone.

The agent's shell starts and reaps processes as it is told here, and says when nothing of a grant is left. They die with
the agent, so that another process of it begins with an empty node.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.protocol.messages.pool import NodeGrant, NodeState


@dataclass(frozen=True, slots=True)
class StartGrant:
    """Start what belongs to a grant: the node is the job's."""

    grant: int
    job: str
    submission: int
    standby: bool = False


@dataclass(frozen=True, slots=True)
class ReapGrant:
    """End everything that belongs to a grant; once no process of it is left, `Fence.reaped` is to be called."""

    grant: int


@dataclass(frozen=True, slots=True)
class SayStanding:
    """Tell the pool how the node stands, where it can be told."""

    stands: NodeState


FenceInstruction = StartGrant | ReapGrant | SayStanding
_NOBODY = NodeGrant(term=0, version=0)


class Fence:
    """Whose the node is."""

    def __init__(self) -> None:
        #: the grant whose processes are here, 0: none
        self.runs = 0
        #: up to this grant everything is over here, and nothing of it is ever started
        self.ended = 0
        self._reaping = False
        self._changes = 0
        self._told = _NOBODY

    @property
    def stands(self) -> NodeState:
        """What the pool is told."""
        return NodeState(runs=self.runs, ended=self.ended, changes=self._changes)

    @property
    def heard(self) -> tuple[int, int]:
        """The term and version of the pool's newest record of which was heard."""
        return self._told.term, self._told.version

    @property
    def pool(self) -> str:
        """The identity of the pool of which that was heard, "" before the first word."""
        return self._told.identity

    def told(self, grant: NodeGrant) -> list[FenceInstruction]:
        """The pool says whose the node is; what is older than was heard changes nothing."""
        if (grant.term, grant.version) < (self._told.term, self._told.version):
            return []
        self._told = grant
        return self._follow()

    def reaped(self, grant: int) -> list[FenceInstruction]:
        """Nothing of a grant is left here, whoever wanted that: the pool, the job, or the processes themselves."""
        if grant != self.runs:
            return []
        self.runs, self.ended, self._reaping = 0, grant, False
        return [SayStanding(self.stands), *self._follow()]

    def changed(self) -> list[FenceInstruction]:
        """What a job has found wrong with this node may be so no more."""
        self._changes += 1
        return [SayStanding(self.stands)]

    def _follow(self) -> list[FenceInstruction]:
        told = self._told
        if self.runs:
            if told.grant == self.runs or self._reaping:
                return []
            self._reaping = True
            return [ReapGrant(self.runs)]
        if told.grant <= self.ended:
            return []  # (nobody's, or it is over)
        self.runs = told.grant
        return [StartGrant(told.grant, told.job, told.submission, told.standby), SayStanding(self.stands)]
