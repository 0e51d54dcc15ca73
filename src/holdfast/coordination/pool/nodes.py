"""A pool's nodes: who is here, whose they are, and what they say of grants that are over."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from holdfast.coordination.pool.state import Connected, PoolState
from holdfast.errors import BadInputError, RefusedError, UnreachableError
from holdfast.protocol.messages.pool import LeavePool, NodeState, PoolHello, PoolRefusal
from holdfast.protocol.names import PROTOCOL
from holdfast.protocol.pool.events import NodeAdded, NodeDrained, NodeForgotten, NodeUndrained
from holdfast.protocol.pool.record import PoolNode


class PooledNodes:
    """Who is here."""

    def __init__(self, state: PoolState) -> None:
        self._state = state
        #: when is looked next who is gone for good
        self._looks_at = 0.0

    def hello(self, connection: int, hello: PoolHello) -> None:
        """A node is here: what belongs to an earlier process of its agent died with that."""
        state = self._state
        known, here = state.nodes.get(hello.node), state.here.get(hello.node)
        if hello.protocol != PROTOCOL:
            why = (
                f"node {hello.node} speaks version {hello.protocol}, and the pool {PROTOCOL}: install the same holdfast"
            )
            self._refuse(connection, why)
            return
        if knows := self._newer(hello.stands, hello.term, hello.version):
            same = hello.identity == state.identity
            # A store that was restored has the pool's identity. One that was lost has given nobody a node.
            if (same and not state.proven) or (not same and hello.stands.runs and not state.record.last_grant):
                state.stop_outdated(f"node {hello.node} knows {knows}")
                return
            self._refuse_newer(connection, hello.node, knows, hello.stands)
            return
        if known is None and len(state.nodes) >= state.config.most_nodes and not self._make_room():
            why = f"the pool has {len(state.nodes)} nodes, and takes no more: none of them is gone for good"
            self._refuse(connection, why)
            return
        if here is not None and here.connection != connection:
            if known is None or known.session != hello.session:
                why = f"a node of the name {hello.node} is here already: give the other one another (--node-name)"
                self._refuse(connection, why)
                return
            state.close(here.connection)
            self.gone(here.connection)
        drained = known is not None and known.drained
        node = PoolNode(
            name=hello.node,
            session=hello.session,
            rack=hello.rack,
            zone=hello.zone,
            drained=drained,
            passing=hello.passing,
        )
        if known is None:
            state.emit(NodeAdded, node=node.name, rack=node.rack, zone=node.zone)
        if known != node:
            state.put_node(node)
        if known is not None and known.session != hello.session:
            state.came_anew(node.name)
        state.away.pop(node.name, None)
        state.repaired(node.name)
        state.here[node.name] = state.by_connection[connection] = Connected(node.name, connection, state.now)
        grant = state.grants.get(node.name)
        if grant is not None and grant.session != hello.session:
            trained = grant.number in state.trains.get(grant.job, frozenset())
            state.release(grant, by="node", failed=trained)
        self._take_over(state.here[node.name], hello.stands)
        state.tell_node(node.name)

    def _newer(self, stands: NodeState, term: int = 0, version: int = 0) -> str:
        """Return what a node knows of this pool that its record does not, in words, or "" if the record has it all.

        The node takes what is decided here for stale, and does nothing of it.
        """
        record, grant, told = self._state.record, max(stands.runs, stands.ended), (term, version)
        # (a server opens a term of its own: what earlier ones have told is compared with the record as it was found)
        if told > (record.term, record.version) or self._state.found < told < (record.term, 0):
            return f"version {version} of its record, by server {term}"
        return f"grant {grant}" if grant > record.last_grant else ""

    def _refuse_newer(self, connection: int, node: str, knows: str, stands: NodeState) -> None:
        """Refuse a node that knows more than the record; what runs there runs on."""
        pool = self._state.record.pool
        why = (
            f"node {node} knows {knows} of a pool {pool} that this one does not: it is another one, or what was in its "
            "store is lost; start the node's agent again"
        )
        self._state.touch()  # (a server that another has followed learns of that before it says such a thing)
        self._refuse(connection, why, stays=stands.runs > 0)

    def _refuse(self, connection: int, why: str, *, stays: bool = False) -> None:
        self._state.send(connection, PoolRefusal(why=why, stays=stays))
        self._state.close(connection)

    def stands(self, here: Connected, stands: NodeState) -> None:
        """A node that is here says what runs there, and what is over."""
        if knows := self._newer(stands):
            self._refuse_newer(here.connection, here.name, knows, stands)
            self.gone(here.connection)
        else:
            self._take_over(here, stands)

    def _take_over(self, here: Connected, stands: NodeState) -> None:
        grant = self._state.grants.get(here.name)
        if grant is not None and grant.number <= stands.ended:
            self._state.release(grant, by="node")
        if stands.changes > here.changes:
            here.changes = stands.changes
            self._state.came_anew(here.name)

    def leave(self, here: Connected, _: LeavePool) -> None:
        """A node goes for good, and nothing runs there any more."""
        state = self._state
        grant = state.grants.get(here.name)
        if grant is not None:
            state.release(grant, by="node")
        state.close(here.connection)
        self.gone(here.connection)
        self._drop(here.name, "it has left")

    def gone(self, connection: int) -> None:
        """A node is out of touch. Whose it is stays as it is: its job may well see it."""
        here = self._state.by_connection.pop(connection, None)
        if here is not None:
            del self._state.here[here.name]
            self._state.away[here.name] = self._state.now

    def expire(self) -> None:
        """Close the connections of those that have said nothing for too long, and forget who is gone for good."""
        state = self._state
        before = state.now - state.config.lease_s
        for here in [one for one in state.here.values() if one.seen < before]:
            state.close(here.connection)
            self.gone(here.connection)
        if state.now >= self._looks_at:
            self._looks_at = state.now + state.config.back_s / 2
            self._forget_who_is_gone()

    def _forget_who_is_gone(self) -> None:
        """Whoever comes back all the same is welcome: as a new node."""
        state = self._state
        for name in self._forgettable():
            away_s = state.now - state.away[name]
            if away_s >= (state.config.back_s if state.nodes[name].passing else state.config.forget_s):
                self._drop(name, f"it has been away for {away_s:.0f} s")

    def _forgettable(self) -> list[str]:
        """Return the nodes that are away and nobody's, those first that went first; none that a person has drained."""
        state = self._state
        return [name for name in state.away if name not in state.grants and not state.nodes[name].drained]

    def _make_room(self) -> bool:
        """Forget who has been away longest, where the pool is full; tell whether somebody was."""
        gone = self._forgettable()
        if gone:
            self._drop(gone[0], f"another has come, and the pool keeps {self._state.config.most_nodes}")
        return bool(gone)

    def renew_all(self) -> None:
        """Nobody has listened for a while: nobody is late."""
        for here in self._state.here.values():
            here.seen = self._state.now

    def drain(self, names: Sequence[str], *, drained: bool) -> None:
        """A person has nodes looked after, or lets jobs have them again; what is so already stays so.

        Raises:
            BadInputError: none is named.
            UnreachableError: there is no such node; nothing is done.
        """
        if not names:
            raise BadInputError("no node is named: say which one is meant")
        for name in names:
            self._check_known(name)
        for name in dict.fromkeys(names):
            if self._state.nodes[name].drained != drained:
                self._state.put_node(replace(self._state.nodes[name], drained=drained))
                self._state.emit(NodeDrained if drained else NodeUndrained, node=name)

    def _check_known(self, name: str) -> None:
        if name not in self._state.nodes:
            known = ", ".join(sorted(self._state.nodes)) or "none"
            raise UnreachableError(f"there is no node {name!r}: the nodes are {known}")

    def forget(self, name: str) -> None:
        """A person says that a node does not come back.

        Raises:
            UnreachableError: there is no such node.
            RefusedError: it is here, or a job has it.
        """
        state = self._state
        self._check_known(name)
        if name in state.here:
            raise RefusedError(f"node {name} is here: stop its agent, and it is forgotten by itself")
        grant = state.grants.get(name)
        if grant is not None:
            raise RefusedError(f"node {name} is one of job {grant.job}, which has not lost it")
        self._drop(name, "a person has said that it does not come back")

    def _drop(self, name: str, why: str) -> None:
        self._state.drop_node(name)
        self._state.emit(NodeForgotten, node=name, why=why)

    @property
    def all_here(self) -> bool:
        """Whether every node of the pool is connected."""
        return len(self._state.here) == len(self._state.nodes)
