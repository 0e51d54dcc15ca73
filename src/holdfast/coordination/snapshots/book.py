"""The snapshots that can be used: complete ones, of committed steps, on the decided lineage.

A snapshot has one part for each member of its generation. It is complete if connected nodes hold all parts. If all
members have copied the state of a step, all of them had applied it. Such a step is repeated with another result only
after a rollback behind it. Nothing here is durable: agents report their parts again to a new coordinator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import msgspec

from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.experts.blobs import find_lost_experts
from holdfast.coordination.membership import Node
from holdfast.coordination.snapshots.keeping import peers_of
from holdfast.coordination.transaction import Transaction
from holdfast.protocol.events import SnapshotFailed, SnapshotRejected, SnapshotSaved
from holdfast.protocol.messages import worker as worker_messages
from holdfast.protocol.messages.agent import DropSnapshots, KeepSnapshots, NodeSnapshots, WantedPart
from holdfast.protocol.names import node_of
from holdfast.protocol.plan import FaultThreshold
from holdfast.protocol.record import Record
from holdfast.protocol.state import Keeper, SnapshotKey, SnapshotPart, SnapshotSource, seal_of

#: Copies are ordered of at most this many snapshots, the newest ones.
NEWEST = 2
#: With at most this many nodes, all parts are checked at every report.
FEW = 64
#: With more nodes, this many are checked per second.
LOOKED_THROUGH = 500
#: Seals of at most this many plans are kept.
KNOWN_SEALS = 16


@dataclass(slots=True)
class _Cost:
    """The costs of a snapshot so far, over its members."""

    nbytes: int = 0
    seconds: float = 0.0
    stall_s: float = 0.0


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
#: The costs and the announcements of at most this many snapshots are kept.
_KEPT = 64
#: At most this many damaged copies and useless snapshots are remembered.
_KEPT_DAMAGED = 4096


@dataclass(slots=True)
class _Held:
    """One snapshot, and the holders of each part in the order of their reports."""

    example: SnapshotPart
    holders: dict[int, list[Node]] = field(default_factory=dict[int, list[Node]])

    @property
    def complete(self) -> bool:
        """Whether each part has a holder."""
        return len(self.holders) == self.example.parts


class SnapshotBook:
    """The snapshot parts of the connected nodes, and the decisions that follow."""

    def __init__(self, transaction: Transaction, config: CoordinatorConfig) -> None:
        self._transaction, self._config = transaction, config
        self._costs: dict[SnapshotKey, _Cost] = {}
        #: Damaged copies (snapshot, part, node), the oldest first.
        self._bad: dict[tuple[SnapshotKey, int, str], None] = {}
        #: Snapshots without a usable copy, the oldest first.
        self._lost: dict[SnapshotKey, None] = {}
        #: The snapshots announced last, the oldest first.
        self._announced: dict[SnapshotKey, None] = {}
        #: The parts that each node was last ordered to keep.
        self._asked: dict[str, tuple[WantedPart, ...]] = {}
        #: The step of the snapshot that was last reported as failed.
        self._failed = 0
        self._changed = False
        #: Whether a snapshot is complete, but its step is not committed yet.
        self._ahead = False
        self._checked_at = 0.0
        #: Seals by the (term, generation) of a plan.
        self._seals: dict[tuple[int, int], bytes] = {}
        #: When this coordinator first checked for awaited nodes.
        self._since: float | None = None

    @property
    def key(self) -> bytes:
        """The key that readers of parts must know."""
        return self._config.snapshot_key(self._transaction.record.born)

    # ---- reports ----

    def on_parts_held(self, node: Node, reported: NodeSnapshots | None) -> None:
        """Record the parts that a node says it holds, and order it to drop useless ones: of another run (which is also
        emitted), of undone steps or of another layout.

        None: it keeps no snapshots.
        """
        if reported is None:
            return
        self._changed = True
        parts = tuple(
            part for part in reported.parts if self._is_ours(part) and _is_of_use(self._transaction.record, part)
        )
        others = tuple(part for part in reported.parts if part not in parts)
        node.snapshots = NodeSnapshots(host=reported.host, port=reported.port, parts=parts)
        if not others:
            return
        foreign = [part for part in others if not self._is_ours(part)]
        why = "of another run of the job" if foreign else "of steps that were undone, or another layout's"
        self._transaction.send(
            node.connection, DropSnapshots(term=self._transaction.record.term, parts=others, why=why)
        )
        if foreign:
            self._transaction.emit(SnapshotRejected, step=foreign[0].step, node=node.name, why=why)

    def on_snapshot_message(
        self, message: worker_messages.SnapshotTaken | worker_messages.SnapshotLeftOut | worker_messages.SnapshotDamaged
    ) -> bool:
        """Handle a member's report: add up the cost of a part, emit the first failure of a step, or exclude damaged
        copies.

        Return True if the generation cannot continue, because the snapshot that it restores is lost.
        """
        match message:
            case worker_messages.SnapshotTaken():
                cost = self._costs.setdefault(message.snapshot.key, _Cost())
                _keep_newest(self._costs, _KEPT)
                cost.nbytes += message.bytes
                cost.seconds, cost.stall_s = max(cost.seconds, message.seconds), max(cost.stall_s, message.stall_s)
                return False
            case worker_messages.SnapshotLeftOut():
                # If one node has no room, others may have none either: report only the first.
                if message.step != self._failed:
                    self._failed = message.step
                    self._transaction.emit(
                        SnapshotFailed, node=node_of(message.worker), step=message.step, why=message.why
                    )
                return False
            case worker_messages.SnapshotDamaged():
                return self._on_snapshot_damaged(message)

    def _on_snapshot_damaged(self, message: worker_messages.SnapshotDamaged) -> bool:
        """Exclude a damaged copy, or the whole snapshot if no node is named, and emit that. Repeated reports are
        ignored.

        Return whether the current decision restores this snapshot, but can no longer do so: the whole snapshot is
        excluded, or all copies of a part that the decision names are damaged.
        """
        key, copy = message.snapshot.key, (message.snapshot.key, message.snapshot.part, message.node)
        if key in self._lost or copy in self._bad:
            return False
        self._changed = True
        if message.node:
            self._bad[copy] = None
        else:
            self._lost[key] = None
        _keep_newest(self._bad, _KEPT_DAMAGED)
        _keep_newest(self._lost, _KEPT_DAMAGED)
        self._transaction.emit(SnapshotRejected, step=message.snapshot.step, node=message.node, why=message.why)
        decision = self._transaction.record.decision
        source = decision.source if decision is not None else None
        if not isinstance(source, SnapshotSource) or source.part(0).key != key:
            return False
        # Only the copies that were named in the decision count. A worker that has tried them all waits, although others
        # may have appeared since.
        names = [keeper.node for keeper in source.keepers]
        # Experts have other copies. A worker that finds none of an expert reports the whole snapshot.
        parts = source.parts[: source.dense]
        copies = [[(key, number, names[place]) for place in places] for number, places in enumerate(parts)]
        return key in self._lost or any(self._bad.keys() >= set(these) for these in copies)

    # ---- decisions ----

    def find_newest(self, committed: int) -> SnapshotSource | None:
        """Return the newest complete and usable snapshot, stashed state included, of a step up to `committed`, with the
        nodes that hold each part, or None.
        """
        found = [
            held for key, held in self._group_parts().items() if key not in self._lost and self._is_full_state(held)
        ]
        held = max((one for one in found if one.example.step <= committed), key=_age, default=None)
        if held is None:
            return None
        nodes = list({node.name: node for nodes in held.holders.values() for node in nodes}.values())
        places = {node.name: place for place, node in enumerate(nodes)}
        example = held.example
        return SnapshotSource(
            term=example.term,
            generation=example.generation,
            step=example.step,
            seal=example.seal,
            keepers=tuple(keeper for node in nodes if (keeper := _keeper(node)) is not None),
            parts=tuple(tuple(places[n.name] for n in held.holders.get(part, ())) for part in range(example.parts)),
            key=self.key,
            everywhere=example.everywhere,
            experts=self._experts_of(held),
        )

    def _is_full_state(self, held: _Held) -> bool:
        """Return whether connected nodes hold a full state.

        For a usual snapshot: each part has a holder. Stashed state must be the one that the record names, with the
        dense part and a copy of each expert.
        """
        if not held.example.everywhere:
            return held.complete
        change = self._transaction.record.change
        return (
            change is not None
            and change.kept == held.example.key
            and self._has_dense(held)
            and not self._find_lost_experts(held)
        )

    @property
    def lost_experts(self) -> Sequence[tuple[int, int]]:
        """The experts (layer, number) on disconnected nodes without which the stashed state cannot be used.

        Empty if there is no such state, or if the rest of it is lost, too.
        """
        change = self._transaction.record.change
        held = self._group_parts().get(change.kept) if change is not None and change.kept is not None else None
        return self._find_lost_experts(held) if held is not None and self._has_dense(held) else ()

    def _has_dense(self, held: _Held) -> bool:
        return all(part in held.holders for part in range(held.example.parts - len(self._experts_of(held))))

    def _find_lost_experts(self, held: _Held) -> Sequence[tuple[int, int]]:
        """Return the experts (layer, number) that no held part contains; empty for a snapshot without experts."""
        experts, shape = self._experts_of(held), self._transaction.record.expert_shape
        if shape is None or not experts:
            return ()
        dense = held.example.parts - len(experts)
        return find_lost_experts(shape, [blob for part, blob in enumerate(experts, dense) if part in held.holders])

    def _experts_of(self, held: _Held) -> tuple[bytes, ...]:
        change = self._transaction.record.change
        return change.experts if held.example.everywhere and change is not None else ()

    def is_stashed_on(self, key: SnapshotKey, parts: Mapping[str, int]) -> bool:
        """Return whether each of these nodes is connected and holds its full number of parts of a stashed state.

        Args:
            parts: The number of parts by node.
        """
        here = self._transaction.members.nodes
        held = [(here[name].snapshots if name in here else None, wanted) for name, wanted in parts.items()]
        return all(
            known is not None and len([part for part in known.parts if part.everywhere and part.key == key]) == wanted
            for known, wanted in held
        )

    def newest(self, committed: int) -> tuple[int, int] | None:
        """Return the step of the newest usable snapshot, and the smallest number of copies of its parts."""
        source = self.find_newest(committed)
        return (source.step, min(map(len, source.parts[: source.dense]))) if source is not None else None

    @property
    def is_awaiting_keepers(self) -> bool:
        """Whether nodes with parts of the decided snapshot are disconnected but may still connect: only within a lease
        after this coordinator's start.
        """
        transaction, decision = self._transaction, self._transaction.record.decision
        self._since = transaction.now if self._since is None else self._since
        source = decision.source if decision is not None else None
        if not isinstance(source, SnapshotSource) or transaction.now - self._since > self._config.lease_s:
            return False
        return any(keeper.node not in transaction.members.nodes for keeper in source.keepers)

    def update(self, committed: int, *, at_once: bool = False) -> None:
        """Emit snapshots that are complete and committed, order missing copies, and drop stale stashed state.

        With many nodes, only at intervals, unless `at_once`; nothing if nothing has changed.
        """
        if self._transaction.record.layouts:
            self._drop_stale_stash()
        nodes = len(self._transaction.members.nodes)
        wait_s = nodes / LOOKED_THROUGH if nodes > FEW else 0.0
        early = not at_once and 0.0 <= self._transaction.now - self._checked_at < wait_s
        if early or not (self._changed or self._costs or self._ahead):
            return
        self._checked_at = self._transaction.now
        held = self._group_parts()
        self._announce(held, committed)
        if self._changed:
            self._changed = False
            self._order_copies(held)

    def _drop_stale_stash(self) -> None:
        """Drop stashed state that is no longer needed, because steps were done since or the layout change was
        cancelled.

        The next stash needs the memory.
        """
        record = self._transaction.record
        for node in self._transaction.members.nodes.values():
            held = node.snapshots
            stale = [part for part in held.parts if part.everywhere and not _is_of_use(record, part)] if held else []
            if held is not None and stale:
                node.snapshots = msgspec.structs.replace(held, parts=tuple(p for p in held.parts if p not in stale))
                self._transaction.send(node.connection, DropSnapshots(term=record.term, parts=tuple(stale)))
                self._changed = True

    @property
    def _newest_announced(self) -> SnapshotKey:
        return max(self._announced, default=(0, 0, 0))

    def _announce(self, held: dict[SnapshotKey, _Held], committed: int) -> None:
        """Emit each newly complete snapshot of a committed step, with its cost and the number of nodes that should and
        can hold each part.

        One that is older than an emitted one is emitted only if no newer one is complete now: nodes that hold its parts
        have returned, and the newer ones are lost. Stashed state is not emitted.
        """
        usual = {key: one for key, one in held.items() if not one.example.everywhere and key not in self._lost}
        complete = sorted(key for key, one in usual.items() if one.complete)
        self._ahead = any(key[2] > committed for key in complete)
        known = [key for key in complete if key[2] <= committed]
        before = self._newest_announced
        for key in known:
            if key in self._announced or (key < before and key != known[-1]):
                continue
            self._announced[key] = None
            _keep_newest(self._announced, _KEPT)
            cost = self._costs.get(key, _Cost())
            asked = self._config.spec.recovery.fault_threshold
            nodes = sum(node.snapshots is not None for node in self._transaction.members.nodes.values())
            self._transaction.emit(
                SnapshotSaved,
                step=key[2],
                save_s=cost.seconds,
                saved_bytes=cost.nbytes,
                stall_s=cost.stall_s,
                fault_threshold=FaultThreshold(asked=asked, given=min(asked, nodes)),
            )
        self._costs = {key: cost for key, cost in self._costs.items() if key > self._newest_announced}

    def _order_copies(self, held: dict[SnapshotKey, _Held]) -> None:
        """Order peers to copy parts of the newest snapshots, so that each part lies on as many nodes as the fault
        threshold.

        An order is sent only if it differs from the last one for that node.
        """
        keeping = {name: node for name, node in self._transaction.members.nodes.items() if node.snapshots is not None}
        threshold = self._config.spec.recovery.fault_threshold
        peers = peers_of({name: node.rack for name, node in keeping.items()}, threshold)
        self._asked = {name: asked for name, asked in self._asked.items() if name in keeping}
        wanted: dict[str, list[WantedPart]] = {name: [] for name in keeping}
        for key in sorted(key for key, one in held.items() if not one.example.everywhere)[-NEWEST:]:
            for part, holders in held[key].holders.items():
                here, first = {node.name for node in holders}, holders[0]
                keeper, snapshot = _keeper(first), _numbered(held[key].example, part)
                for peer in peers[first.name] if len(here) < threshold and keeper is not None else ():
                    if peer not in here and keeper is not None:
                        wanted[peer].append(WantedPart(snapshot=snapshot, keeper=keeper))
        for name, parts in wanted.items():
            asked = tuple(parts)
            if asked != self._asked.get(name, ()):
                self._asked[name] = asked
                order = KeepSnapshots(term=self._transaction.record.term, wanted=asked)
                self._transaction.send(keeping[name].connection, order)

    def _group_parts(self) -> dict[SnapshotKey, _Held]:
        """Return the parts of all connected nodes by snapshot, with the nodes that hold each. Damaged and useless parts
        are left out.
        """
        found: dict[SnapshotKey, _Held] = {}
        for node, part in self._parts():
            held = found.setdefault(part.key, _Held(part))
            if part.parts == held.example.parts and part.part < part.parts:
                held.holders.setdefault(part.part, []).append(node)
        return found

    def _parts(self) -> Iterator[tuple[Node, SnapshotPart]]:
        """Yield the parts of connected nodes, in the order in which the nodes connected. Damaged copies are left out,
        and parts that can no longer be of use.
        """
        for node in self._transaction.members.nodes.values():
            for part in node.snapshots.parts if node.snapshots is not None else ():
                if (part.key, part.part, node.name) not in self._bad and _is_of_use(self._transaction.record, part):
                    yield node, part

    def _is_ours(self, part: SnapshotPart) -> bool:
        """Return whether a part belongs to this run: its seal is the one that this run computes for its term and
        generation.

        Parts of later terms or generations than the record's do not.
        """
        record = self._transaction.record
        if part.term > record.term or part.generation > record.generation:
            return False
        plan = part.term, part.generation
        if plan not in self._seals:
            self._seals = {**dict(list(self._seals.items())[-KNOWN_SEALS:]), plan: self._seal(*plan)}
        return part.seal == self._seals[plan]

    def _seal(self, term: int, generation: int) -> bytes:
        return seal_of(self._config.plan_secret(self._transaction.record.born, term, generation))


class _Saved(Protocol):
    @property
    def generation(self) -> int: ...

    @property
    def step(self) -> int: ...


def on_lineage(record: Record, part: _Saved) -> bool:
    """Return whether no roll-back has undone the step of a part (or checkpoint).

    False without any base, or for a generation before the oldest known one.
    """
    bases = record.bases
    if not bases or part.generation < bases[0][0]:
        return False
    return all(part.step <= step for generation, step in bases if generation > part.generation)


def _is_of_use(record: Record, part: SnapshotPart) -> bool:
    """Return whether a part may be read later: it lies on the lineage, or is stashed for a layout change."""
    if not part.everywhere:
        return on_lineage(record, part)
    change, plan = record.change, record.plan
    if change is None or change.kept is not None:
        return change is not None and part.key == change.kept
    return plan is not None and plan.puts_away and part.generation == plan.generation


def _keep_newest(table: dict[_Key, _Value], most: int) -> None:
    """Remove the oldest entries of a table that has more than `most`."""
    while len(table) > most:
        del table[next(iter(table))]


def _age(held: _Held) -> tuple[int, SnapshotKey]:
    return held.example.step, held.example.key


def _keeper(node: Node) -> Keeper | None:
    held = node.snapshots
    return Keeper(node=node.name, host=held.host, port=held.port) if held is not None else None


def _numbered(example: SnapshotPart, part: int) -> SnapshotPart:
    return SnapshotPart(
        term=example.term,
        generation=example.generation,
        step=example.step,
        part=part,
        parts=example.parts,
        seal=example.seal,
    )
