"""The nodes of a pool: connections, ownership, and their reports of ended grants."""

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
    """Connects, refuses, drains and forgets nodes."""

    def __init__(self, state: PoolState) -> None:
        self._state = state
        #: when to look next for nodes to forget
        self._next_check_at = 0.0

    def on_hello(self, connection: int, hello: PoolHello) -> None:
        """Handle the first message of a node: connect it, with the grant that it reports and the one that it should
        have, or refuse it.

        Refused are another protocol, a node that knows a newer record, a full pool, and the name of a connected node
        with another session; the same session replaces its earlier connection. If the record is outdated, this server
        stops. Processes of the node's earlier agent died with it: its grant is released.
        """
        state = self._state
        known, here = state.nodes.get(hello.node), state.connected.get(hello.node)
        if hello.protocol != PROTOCOL:
            why = (
                f"node {hello.node} speaks version {hello.protocol}, and the pool {PROTOCOL}: install the same holdfast"
            )
            self._refuse(connection, why)
            return
        if knows := self._describe_newer(hello.stands, hello.term, hello.version):
            same = hello.identity == state.identity
            # A restored store has the pool's identity. A store created after a loss has never granted a node.
            if (same and not state.is_newest) or (not same and hello.stands.runs and not state.record.last_grant):
                state.stop_outdated(f"node {hello.node} knows {knows}")
                return
            self._refuse_newer(connection, hello.node, knows, hello.stands)
            return
        if known is None and len(state.nodes) >= state.config.most_nodes and not self._make_room():
            why = f"the pool has {len(state.nodes)} nodes, and accepts no more: none of them can be forgotten"
            self._refuse(connection, why)
            return
        if here is not None and here.connection != connection:
            if known is None or known.session != hello.session:
                why = f"a node of the name {hello.node} is here already: give the other one another (--node-name)"
                self._refuse(connection, why)
                return
            state.close_connection(here.connection)
            self.on_disconnect(here.connection)
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
            state.outdate_unfit(node.name)
        state.away.pop(node.name, None)
        state.record_repair(node.name)
        state.connected[node.name] = state.by_connection[connection] = Connected(node.name, connection, state.now)
        grant = state.grants.get(node.name)
        if grant is not None and grant.session != hello.session:
            trained = grant.number in state.training_grants.get(grant.job, frozenset())
            state.release_grant(grant, by="node", failed=trained)
        self._apply_state(state.connected[node.name], hello.stands)
        state.notify_node(node.name)

    def _describe_newer(self, stands: NodeState, term: int = 0, version: int = 0) -> str:
        """Return in words which facts the node knows and this pool's record lacks, or "".

        Such a node would ignore the decisions of this server as outdated.

        Args:
            stands: the node's newest grant that runs or has ended
            term: server whose record the node knows, 0 without one
            version: of that record
        """
        record = self._state.record
        grant = max(stands.runs, stands.ended)
        known = (term, version)
        # Each server opens a new term. Versions of earlier servers are compared with the record as this server found
        # it.
        if known > (record.term, record.version) or self._state.found_version < known < (record.term, 0):
            return f"version {version} of its record, by server {term}"
        return f"grant {grant}" if grant > record.last_grant else ""

    def _refuse_newer(self, connection: int, node: str, knows: str, stands: NodeState) -> None:
        """Refuse a node that knows more than the record; its processes continue. The record is written first, which
        fails if another server has replaced this one.

        `knows`: from `_describe_newer`.
        """
        pool = self._state.record.pool
        why = (
            f"node {node} knows {knows} of a pool {pool} that this one does not: it is another one, or its store was "
            "lost; start the node's agent again"
        )
        # If another server has replaced this one, the write fails before the refusal is sent.
        self._state.force_write()
        self._refuse(connection, why, stays=stands.runs > 0)

    def _refuse(self, connection: int, why: str, *, stays: bool = False) -> None:
        """Send a refusal, and close the connection."""
        self._state.send(connection, PoolRefusal(why=why, stays=stays))
        self._state.close_connection(connection)

    def on_state(self, here: Connected, stands: NodeState) -> None:
        """Handle the report of a connected node: release its grant if that has ended, and if the node has changed,
        forget that jobs refused it.

        Refuse and disconnect the node if it knows of a newer grant than the record.
        """
        if knows := self._describe_newer(stands):
            self._refuse_newer(here.connection, here.name, knows, stands)
            self.on_disconnect(here.connection)
        else:
            self._apply_state(here, stands)

    def _apply_state(self, here: Connected, stands: NodeState) -> None:
        """Release the node's grant if it has ended, and if the node has changed, forget that jobs refused it."""
        grant = self._state.grants.get(here.name)
        if grant is not None and grant.number <= stands.ended:
            self._state.release_grant(grant, by="node")
        if stands.changes > here.changes:
            here.changes = stands.changes
            self._state.outdate_unfit(here.name)

    def on_leave(self, here: Connected, _: LeavePool) -> None:
        """Handle that a node leaves permanently, with no process left on it: release its grant, close its connection,
        and forget it.
        """
        state = self._state
        grant = state.grants.get(here.name)
        if grant is not None:
            state.release_grant(grant, by="node")
        state.close_connection(here.connection)
        self.on_disconnect(here.connection)
        self._drop_node(here.name, "it has left")

    def on_disconnect(self, connection: int) -> None:
        """Record the time at which a connection closed.

        The node keeps its grant: the job may still reach it. Unknown connections are ignored.
        """
        here = self._state.by_connection.pop(connection, None)
        if here is not None:
            del self._state.connected[here.name]
            self._state.away[here.name] = self._state.now

    def expire_nodes(self) -> None:
        """Close connections that were silent for longer than the lease; their nodes keep their grants. Now and then,
        forget nodes without a grant that stayed away.
        """
        state = self._state
        before = state.now - state.config.lease_s
        for here in [node for node in state.connected.values() if node.seen < before]:
            state.close_connection(here.connection)
            self.on_disconnect(here.connection)
        if state.now >= self._next_check_at:
            self._next_check_at = state.now + state.config.back_s / 2
            self._forget_absent_nodes()

    def _forget_absent_nodes(self) -> None:
        """Forget nodes without a grant that stayed away too long, transient ones earlier.

        One that returns joins as a new node.
        """
        state = self._state
        for name in self._list_forgettable():
            away_s = state.now - state.away[name]
            if away_s >= (state.config.back_s if state.nodes[name].passing else state.config.forget_s):
                self._drop_node(name, f"it has been away for {away_s:.0f} s")

    def _list_forgettable(self) -> list[str]:
        """Return the disconnected nodes without a grant that are not drained, the longest absent first."""
        state = self._state
        return [name for name in state.away if name not in state.grants and not state.nodes[name].drained]

    def _make_room(self) -> bool:
        """Forget the node without a grant that was away longest; return whether there was one."""
        forgettable = self._list_forgettable()
        if forgettable:
            self._drop_node(forgettable[0], f"another has come, and the pool keeps {self._state.config.most_nodes}")
        return bool(forgettable)

    def renew_leases(self) -> None:
        """Renew the leases of all nodes: this server itself did not listen for a while."""
        for here in self._state.connected.values():
            here.seen = self._state.now

    def set_drained(self, names: Sequence[str], *, drained: bool) -> None:
        """Drain nodes, or end their drain, and emit that; nodes in that state already are left as they are.

        Raises:
            BadInputError: No node is given.
            UnreachableError: A node is unknown; no node is changed.
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
        """Refuse an unknown node.

        Raises:
            UnreachableError: The pool has no such node.
        """
        if name not in self._state.nodes:
            known = ", ".join(sorted(self._state.nodes)) or "none"
            raise UnreachableError(f"there is no node {name!r}: the nodes are {known}")

    def forget_node(self, name: str) -> None:
        """Forget a node that a user says will not return.

        Raises:
            UnreachableError: The pool has no such node.
            RefusedError: The node is connected, or a job has it.
        """
        state = self._state
        self._check_known(name)
        if name in state.connected:
            raise RefusedError(f"node {name} is connected: stop its agent, and the pool forgets it")
        grant = state.grants.get(name)
        if grant is not None:
            raise RefusedError(f"node {name} is one of job {grant.job}, which has not lost it")
        self._drop_node(name, "a person has said that it does not come back")

    def _drop_node(self, name: str, why: str) -> None:
        """Remove a node from the record, and emit the event."""
        self._state.drop_node(name)
        self._state.emit(NodeForgotten, node=name, why=why)

    @property
    def all_connected(self) -> bool:
        """Whether every node of the pool is connected."""
        return len(self._state.connected) == len(self._state.nodes)
