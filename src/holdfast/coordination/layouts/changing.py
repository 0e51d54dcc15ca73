"""Changes the layout: all members stash a step's state in node memory, and new workers load it from there.

1. Stop, as for a drain.
2. A plan that `puts_away`, in which nothing is computed.
3. Each node has the whole state.
4. The record names the new layout, and the nodes with the stash.
5. All workers are replaced, and load the stash.

A failure before step 4 undoes the change, and training continues. After it, the job starts with the stashed state. One
node has all of it except experts; of these each node has the ones that it hosted. So as many nodes may be lost as
during training. After a larger loss the job starts as after the loss of all live copies.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping

import msgspec

from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.generations.interruption import Interruption
from holdfast.coordination.layouts.choosing import LayoutChoice, choose_layout
from holdfast.coordination.membership import Node
from holdfast.coordination.nodes.disconnected_nodes import DisconnectedNodes
from holdfast.coordination.nodes.draining import Draining
from holdfast.coordination.progress.announced import Progress
from holdfast.coordination.progress.costs import Cost
from holdfast.coordination.progress.recovery_cost import LAYOUT
from holdfast.coordination.snapshots.book import SnapshotBook
from holdfast.coordination.transaction import Transaction
from holdfast.protocol.events import LayoutChanged, LayoutKept
from holdfast.protocol.layouts.layout import Layout
from holdfast.protocol.layouts.layout_list import LayoutChange, describe_layout
from holdfast.protocol.messages.worker import Attach
from holdfast.protocol.plan import Decision, DecisionKind, GenerationPlan
from holdfast.protocol.state import SnapshotKey, SnapshotSource

#: Seconds for which a change counts as recent. Each recent change doubles the wait for the next one.
RECENT_S = 600.0
_MOST_RECENT = 5
#: seconds before a failed change is tried again
RETRY_S = 60.0


class LayoutChanges:
    """Decides which layout the job should have, and follows the change to it."""

    def __init__(
        self,
        transaction: Transaction,
        config: CoordinatorConfig,
        progress: Progress,
        stopping: Interruption,
        absences: DisconnectedNodes,
        snapshots: SnapshotBook,
        departures: Draining,
    ) -> None:
        self._transaction = transaction
        self._config = config
        self._progress = progress
        self._stopping = stopping
        self._absences = absences
        self._snapshots = snapshots
        self._departures = departures
        #: the layout to change to
        self._wanted: LayoutChoice | None = None
        #: since when that is wanted
        self._since = 0.0
        #: the change for which members were stopped
        self._requested: LayoutChange | None = None
        #: since when the members stash their state
        self._stash_since: float | None = None
        #: why the stash failed, or ""
        self._failure_reason = ""
        #: whether another try would fail too
        self._is_permanent = False
        #: numbers of nodes and layouts for which the stash always fails
        self._impossible: set[tuple[int, Layout]] = set()
        self._not_before = 0.0
        #: times of the last changes
        self._recent: deque[float] = deque(maxlen=_MOST_RECENT)
        #: number of nodes and layout of the last report that the layout stays
        self._reported: tuple[int, Layout] | None = None

    # ---- layouts of connected workers ----

    def replace_if_outdated(self, node: Node, attach: Attach) -> bool:
        """Replace the workers of a node if an attaching one has another of the job's layouts than the current one.

        Returns:
            Whether they are replaced; not if the job's list of layouts differs.
        """
        record = self._transaction.record
        if not attach.layouts or attach.layouts != record.layouts or attach.layout == record.layout:
            return False
        self.replace_workers_on(node.name)
        return True

    def replace_workers_on(self, name: str) -> None:
        """Replace the workers of a node, which have another layout than the current one."""
        self._absences.replace_workers(
            [name], f"the layout in force is {describe_layout(self._transaction.record.layout)}"
        )

    # ---- whether to change ----

    def start_if_due(self, plan: GenerationPlan) -> None:
        """Interrupt the generation for another layout, if it has been worth its cost for long enough; call it after a
        committed step.

        Nothing happens while anything else changes. If the current layout stays, emit why, once; if a node cannot stash
        the state, give up for now.
        """
        transaction, record = self._transaction, self._transaction.record
        if not self._can_change(plan):
            self._wanted = None
            return
        nodes = len({member.node for member in plan.members})
        choice = self.choose(nodes, self._measured_times(plan))
        if choice.layout == record.layout or not choice.is_worth(self._progress.costs.of(Cost.LAYOUT)):
            self._wanted = None
            self._report_kept(nodes, choice)
            return
        if (nodes, choice.layout) in self._impossible:
            return
        if self._wanted is None or self._wanted.layout != choice.layout:
            self._wanted = choice
            self._since = transaction.now
        if transaction.now < max(self._not_before, self._since + self._patience_s):
            return
        if lacking := [name for name in self._nodes_of(plan) if transaction.members.nodes[name].snapshots is None]:
            self._give_up(record.layout, nodes, f"node {lacking[0]} has no memory for the stashed state")
            return
        self._requested = LayoutChange(
            before=record.layout, after=choice.layout, why=choice.why, nodes=nodes, since=transaction.now
        )
        self._stopping.start(transaction.now, reason=LAYOUT)

    def _can_change(self, plan: GenerationPlan) -> bool:
        """Return whether the job can change its layout now: all members train, and nothing else is changing.

        Never if it has no other layout, or restarts all workers after failures.
        """
        transaction, record = self._transaction, self._transaction.record
        if not record.layouts or self._config.spec.recovery.restarts_all or self._stopping.stop is not None:
            return False
        busy = record.leaving or record.change is not None or transaction.members.unfinished(plan) < len(plan.members)
        raised = any(info.raised for info in transaction.members.workers())
        return not (busy or raised or any(transaction.members.outside(plan)))

    def choose(self, nodes: int, measured_s: Mapping[str, float]) -> LayoutChoice:
        """Return the layout that the job should have.

        Args:
            nodes: number of nodes
            measured_s: seconds of a micro-batch, by the names of layouts
        """
        record = self._transaction.record
        return choose_layout(
            record.layouts,
            record.layout,
            nodes=nodes,
            workers=max(node.expected for node in self._transaction.members.regular),
            micro_batches=record.micro_batches,
            measured_s=measured_s,
            too_large=record.too_large,
            failed=[one.layout for one in record.failed_layouts if one.until > self._transaction.now],
        )

    def _measured_times(self, plan: GenerationPlan) -> dict[str, float]:
        """Return the measured seconds of a micro-batch by the names of layouts, that of the current one last if it is
        known.
        """
        record, step_s = self._transaction.record, self._progress.costs.step_of(len(plan.members))
        name = str(record.layout)
        known = {other: seconds for other, seconds in record.layout_s.items() if other != name}
        if step_s:
            known[name] = step_s / -(-record.micro_batches // plan.units)
        elif name in record.layout_s:
            known[name] = record.layout_s[name]
        return known

    @property
    def _patience_s(self) -> float:
        """How long the number of nodes must stay the same before a change; doubled for each recent change."""
        recent = [time for time in self._recent if self._transaction.now - time < RECENT_S]
        return self._config.layout_settle_s * 2 ** len(recent)

    def _report_kept(self, nodes: int, choice: LayoutChoice) -> None:
        """Emit why the layout stays, unless the script chose it or the last report had the same nodes and layout."""
        layout = self._transaction.record.layout
        if choice.by_script or self._reported == (nodes, layout):
            return
        self._reported = nodes, layout
        why = choice.why
        if choice.layout != layout:
            cost_s = self._progress.costs.of(Cost.LAYOUT)
            why = f"{why}; the gain is {choice.gain_s:.0f} s, and a change costs {cost_s:.1f} s"
        self._transaction.emit(LayoutKept, layout=describe_layout(layout), nodes=nodes, why=why)

    def _give_up(self, layout: Layout, nodes: int, why: str) -> None:
        """Give up a change: emit why the layout stays, and try again after a minute at the earliest.

        Args:
            layout: the current layout.
        """
        self._wanted = None
        self._not_before = self._transaction.now + RETRY_S
        self._transaction.emit(LayoutKept, layout=describe_layout(layout), nodes=nodes, why=why)

    # ---- the change ----

    def on_decision(self, decision: Decision, *, ends: bool) -> bool:
        """Return whether the members of the decided generation should stash their state for a requested change.

        If they cannot, because something else came first or the stash failed, the change is undone. If the decision
        uses another state than the change's stash, the change is finished as it is.

        Args:
            decision: the decision of the next generation
            ends: whether the job is saved, and ends
        """
        transaction, asked, change = self._transaction, self._requested, self._transaction.record.change
        self._requested = self._stash_since = None
        live = decision.kind in (DecisionKind.REDO, DecisionKind.FORWARD)
        if asked is not None:
            if live and not ends and self._stopping.reason == LAYOUT and not transaction.record.leaving:
                transaction.change(change=asked)
                return True
            self._undo(asked)
        elif change is not None and change.kept is None:
            self._undo(change)
            transaction.change(change=None)
        elif change is not None and not live and not _is_stash(decision, change.kept):
            self.finish_change(change, f"{change.why}; the stashed state is lost")
        return False

    def _undo(self, change: LayoutChange) -> None:
        """Undo a change that has not taken effect, and emit why. A permanent failure is not tried again with this
        number of nodes.
        """
        why, self._failure_reason = self._failure_reason or "another change came first", ""
        when, lasting, self._is_permanent = "tried later", self._is_permanent, False
        if lasting:
            self._impossible.add((change.nodes, change.after))
            when = f"not tried again with {change.nodes} node{'s' if change.nodes > 1 else ''}"
        self._progress.layout_stays()
        self._give_up(change.before, change.nodes, f"{describe_layout(change.after)} is {when}: {why}")

    def check_stash(self, plan: GenerationPlan) -> None:
        """Activate the new layout once every node has stashed the whole state; cancel the change after the time limit.

        Ignored unless the plan is one in which members stash their state.
        """
        transaction, change, decision = (
            self._transaction,
            self._transaction.record.change,
            self._transaction.record.decision,
        )
        if not plan.puts_away or change is None or decision is None:
            return
        self._stash_since = transaction.now if self._stash_since is None else self._stash_since
        if transaction.now - self._stash_since > self._config.layout_timeout_s:
            self.cancel_stash(f"the state was not stashed within {self._config.layout_timeout_s:g} s")
            return
        committed = self._progress.ledger.committed
        if not transaction.members.entered(plan) or committed < decision.applied:
            return
        key = plan.term, plan.generation, decision.applied
        members = Counter(member.node for member in plan.members)
        experts = plan.expert_plan.placement if plan.expert_plan is not None else ()
        wanted = {node: plan.places + (here if experts else 0) for node, here in members.items()}
        if self._snapshots.is_stashed_on(key, wanted):
            self._finish_stash(plan, msgspec.structs.replace(change, kept=key, experts=experts))

    def cancel_stash(self, why: str, *, lasting: bool = False) -> None:
        """Interrupt the generation that stashes the state, because that cannot succeed; training then continues without
        the change.

        Ignored if no such generation is in force, or if it is interrupted already.

        Args:
            why: the reason
            lasting: whether another try would fail too
        """
        plan = self._transaction.record.plan
        if plan is None or not plan.puts_away or self._stopping.stop is not None:
            return
        self._failure_reason = why
        self._is_permanent = lasting
        self._stopping.start(self._transaction.now, reason=LAYOUT)

    def _finish_stash(self, plan: GenerationPlan, change: LayoutChange) -> None:
        """Record which state the nodes have stashed, and the step times of the present layout.

        Then activate the new layout of `change`: all workers are replaced, and start from the stash.
        """
        transaction = self._transaction
        assert change.kept is not None
        transaction.change(change=change, layout_s=self._measured_times(plan))
        source = self._snapshots.find_newest(change.kept[2])
        assert source is not None
        self._recent.append(transaction.now)
        self._progress.on_state_stashed()
        decision = Decision(kind=DecisionKind.ROLLBACK, applied=source.step, source=source)
        self.activate_layout(change.after, decision)

    def activate_layout(self, layout: Layout, decision: Decision | None) -> None:
        """Record another layout, drop the plan, and replace all workers. Draining nodes are released, and standbys warm
        up again.

        Args:
            decision: how the new workers start: from the stash, or None for the saved state.
        """
        transaction = self._transaction
        self._impossible.clear()
        self._departures.release_all()
        # Standbys must warm up again; their tries start again.
        cold = tuple(msgspec.structs.replace(one, tries=0, ready=False) for one in transaction.record.standbys)
        transaction.change(
            layout=layout,
            standbys=cold,
            config={},  # It describes the sharding of the model; the next worker reports the new one.
            bases=(),  # No other snapshot in memory can be read under another layout.
            plan=None,
            pending=None,
            passed=(),
            decision=decision,
        )
        self._absences.replace_workers(list(transaction.members.nodes), f"another layout: {describe_layout(layout)}")

    def is_from_stash(self, decision: Decision) -> bool:
        """Return whether a decision goes back to the stash of the current layout: then no step is undone."""
        change = self._transaction.record.change
        return change is not None and _is_stash(decision, change.kept)

    @property
    def needed_nodes(self) -> Collection[str]:
        """The nodes that must return before the stash is complete; () if the connected nodes have all of it, or if no
        stash waits to be loaded.
        """
        change = self._transaction.record.change
        if change is None or change.kept is None or self._transaction.record.plan is not None:
            return ()
        return self._transaction.record.stash_nodes if self._snapshots.find_newest(change.kept[2]) is None else ()

    def finish_if_committed(self) -> None:
        """Finish a change once a step after the stash is committed. The layout no longer counts as failed."""
        change = self._transaction.record.change
        if change is not None and change.kept is not None and self._progress.ledger.committed > change.kept[2]:
            worked = (one for one in self._transaction.record.failed_layouts if one.layout != change.after)
            self._transaction.change(failed_layouts=tuple(worked))
            self.finish_change(change, change.why)

    def finish_change(self, change: LayoutChange, why: str) -> None:
        """Remove a change from the record, and emit its cost, unless the job went back to the layout before.

        Args:
            why: the reason for the event.
        """
        down_s, moved_bytes = self._progress.layout_cost(change.since)
        if change.after != change.before:
            self._transaction.emit(
                LayoutChanged,
                from_layout=describe_layout(change.before),
                to_layout=describe_layout(change.after),
                nodes=change.nodes,
                step=change.kept[2] if change.kept is not None else 0,
                why=why,
                down_s=down_s,
                moved_bytes=moved_bytes,
            )
        self._transaction.change(change=None)
        self._reported = None

    def _nodes_of(self, plan: GenerationPlan) -> list[str]:
        """Return the nodes of a plan."""
        return list(dict.fromkeys(member.node for member in plan.members))


def _is_stash(decision: Decision, kept: SnapshotKey | None) -> bool:
    """Return whether the source of a decision is this stash."""
    source = decision.source
    return kept is not None and isinstance(source, SnapshotSource) and source.everywhere and source.part(0).key == kept
