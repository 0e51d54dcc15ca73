"""A change of layout: all members put a step's state into the memory of their nodes, and others take it from there.

Stop, as for a drain -> a plan that `puts_away`, in which nothing is computed -> each node has the whole state -> the
record says that the other layout is in force, and where the state is -> all workers are replaced -> they load it.

Up to that record a failure undoes the change, and training goes on where it was; after it the job begins with the state
that was put away, which a single node that is left has whole: all but experts, of which each has those that it hosted.
So of these as many nodes may be lost as while all train. Else with what there would be after any loss of all.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping

import msgspec

from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.generations.stopping import Stopping
from holdfast.coordination.layouts.choosing import LayoutChoice, choose_layout
from holdfast.coordination.membership import Node
from holdfast.coordination.nodes.absences import Absences
from holdfast.coordination.nodes.departures import Departures
from holdfast.coordination.progress.announced import Progress
from holdfast.coordination.progress.costs import Cost
from holdfast.coordination.progress.recovery_cost import LAYOUT
from holdfast.coordination.snapshots.book import SnapshotBook
from holdfast.coordination.turn import Transaction
from holdfast.protocol.events import LayoutChanged, LayoutKept
from holdfast.protocol.layouts.layout import Layout
from holdfast.protocol.layouts.several import LayoutChange, describe_layout
from holdfast.protocol.messages.worker import Attach
from holdfast.protocol.plan import Decision, DecisionKind, GenerationPlan
from holdfast.protocol.state import SnapshotKey, SnapshotSource

#: changes of so many seconds count as one after the other: each has to wait twice as long as the one before it
RECENT_S = 600.0
_MOST_RECENT = 5
#: where a change has failed, it is not tried again for so long
RETRY_S = 60.0


class LayoutChanges:
    """Which layout is to be in force, and how far the change to it has come."""

    def __init__(
        self,
        transaction: Transaction,
        config: CoordinatorConfig,
        progress: Progress,
        stopping: Stopping,
        absences: Absences,
        snapshots: SnapshotBook,
        departures: Departures,
    ) -> None:
        self._transaction, self._config = transaction, config
        self._progress, self._stopping, self._absences = progress, stopping, absences
        self._snapshots, self._departures = snapshots, departures
        #: what the job is to change to, and since when
        self._wanted: LayoutChoice | None = None
        self._since = 0.0
        #: members were stopped for this change
        self._asked: LayoutChange | None = None
        #: since when state is being put away
        self._putting_since: float | None = None
        #: why it cannot be, where it cannot
        self._no_room = ""
        #: nor ever can it be, as the script has it; for how many nodes which layouts were tried in vain then
        self._lasting = False
        self._in_vain: set[tuple[int, Layout]] = set()
        self._not_before = 0.0
        #: when the last changes were
        self._recent: deque[float] = deque(maxlen=_MOST_RECENT)
        #: for how many nodes, and which layout, it was told that it stays
        self._told: tuple[int, Layout] | None = None

    # ---- who has come with which ----

    def outdated(self, node: Node, attach: Attach) -> bool:
        """Have workers replaced that have come with a layout that is not in force any more; tell whether these have."""
        record = self._transaction.record
        if not attach.layouts or attach.layouts != record.layouts or attach.layout == record.layout:
            return False
        self.replace_on(node.name)
        return True

    def replace_on(self, name: str) -> None:
        """Have a node's workers replaced, which have another layout than the one in force."""
        self._absences.replace_workers(
            [name], f"the layout in force is {describe_layout(self._transaction.record.layout)}"
        )

    # ---- whether to change ----

    def begin(self, plan: GenerationPlan) -> None:
        """A step is committed, and nothing else is about to change: stop the members, if it is time for another."""
        transaction, record = self._transaction, self._transaction.record
        if not self._may_change(plan):
            self._wanted = None
            return
        nodes = len({member.node for member in plan.members})
        choice = self.choose(nodes, self._measured(plan))
        if choice.layout == record.layout or not choice.pays(self._progress.costs.of(Cost.LAYOUT)):
            self._wanted = None
            self._stays(nodes, choice)
            return
        if (nodes, choice.layout) in self._in_vain:
            return
        if self._wanted is None or self._wanted.layout != choice.layout:
            self._wanted, self._since = choice, transaction.now
        if transaction.now < max(self._not_before, self._since + self._patience_s):
            return
        if lacking := [name for name in self._nodes(plan) if transaction.members.nodes[name].snapshots is None]:
            self._gives_up(record.layout, nodes, f"node {lacking[0]} has no memory to put the state away in")
            return
        self._asked = LayoutChange(
            before=record.layout, after=choice.layout, why=choice.why, nodes=nodes, since=transaction.now
        )
        self._stopping.begin(transaction.now, reason=LAYOUT)

    def _may_change(self, plan: GenerationPlan) -> bool:
        transaction, record = self._transaction, self._transaction.record
        if not record.layouts or self._config.spec.recovery.restarts_all or self._stopping.stop is not None:
            return False
        busy = record.leaving or record.change is not None or transaction.members.unfinished(plan) < len(plan.members)
        raised = any(info.raised for info in transaction.members.workers())
        return not (busy or raised or any(transaction.members.outside(plan)))

    def choose(self, nodes: int, measured_s: Mapping[str, float]) -> LayoutChoice:
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

    def _measured(self, plan: GenerationPlan) -> dict[str, float]:
        """Return what a micro-batch took under the layouts that were in force, the newest last."""
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
        """How long the number of nodes has to be what it is; twice as long for each change that was lately."""
        recent = [time for time in self._recent if self._transaction.now - time < RECENT_S]
        return self._config.layout_settle_s * 2 ** len(recent)

    def _stays(self, nodes: int, choice: LayoutChoice) -> None:
        """Tell once for a number of nodes why nothing else is chosen, where something else could be."""
        layout = self._transaction.record.layout
        if choice.told or self._told == (nodes, layout):
            return
        self._told = nodes, layout
        why = choice.why
        if choice.layout != layout:
            cost_s = self._progress.costs.of(Cost.LAYOUT)
            why = f"{why}; that wins {choice.wins_s:.0f} s, and a change costs {cost_s:.1f} s"
        self._transaction.emit(LayoutKept, layout=describe_layout(layout), nodes=nodes, why=why)

    def _gives_up(self, layout: Layout, nodes: int, why: str) -> None:
        """Nothing comes of a change; it is tried again later."""
        self._wanted, self._not_before = None, self._transaction.now + RETRY_S
        self._transaction.emit(LayoutKept, layout=describe_layout(layout), nodes=nodes, why=why)

    # ---- the change ----

    def leads_on(self, decision: Decision, *, ends: bool) -> bool:
        """A generation is decided on: tell whether its members are to put the state away.

        Args:
            ends: the job is being saved, and ends.
        """
        transaction, asked, change = self._transaction, self._asked, self._transaction.record.change
        self._asked = self._putting_since = None
        live = decision.kind in (DecisionKind.REDO, DecisionKind.FORWARD)
        if asked is not None:
            if live and not ends and self._stopping.reason == LAYOUT and not transaction.record.leaving:
                transaction.change(change=asked)
                return True
            self._undone(asked)
        elif change is not None and change.kept is None:
            self._undone(change)
            transaction.change(change=None)
        elif change is not None and not live and not _is_kept(decision, change.kept):
            self.is_over(change, f"{change.why}; what was put away for that is lost")
        return False

    def _undone(self, change: LayoutChange) -> None:
        why, self._no_room = self._no_room or "something else came first", ""
        when, lasting, self._lasting = "tried later", self._lasting, False
        if lasting:
            self._in_vain.add((change.nodes, change.after))
            when = f"not tried again with {change.nodes} node{'s' if change.nodes > 1 else ''}"
        self._progress.layout_stays()
        self._gives_up(change.before, change.nodes, f"{describe_layout(change.after)} is {when}: {why}")

    def put_away(self, plan: GenerationPlan) -> None:
        """See whether every node has the whole state by now: then the other layout is in force."""
        transaction, change, decision = (
            self._transaction,
            self._transaction.record.change,
            self._transaction.record.decision,
        )
        if not plan.puts_away or change is None or decision is None:
            return
        self._putting_since = transaction.now if self._putting_since is None else self._putting_since
        if transaction.now - self._putting_since > self._config.layout_timeout_s:
            self.left_out(f"the state was not put away within {self._config.layout_timeout_s:g} s")
            return
        committed = self._progress.ledger.committed
        if not transaction.members.entered(plan) or committed < decision.applied:
            return
        key = plan.term, plan.generation, decision.applied
        members = Counter(member.node for member in plan.members)
        experts = plan.expert_plan.placement if plan.expert_plan is not None else ()
        wanted = {node: plan.places + (here if experts else 0) for node, here in members.items()}
        if self._snapshots.everywhere(key, wanted):
            self._take_effect(plan, msgspec.structs.replace(change, kept=key, experts=experts))

    def left_out(self, why: str, *, lasting: bool = False) -> None:
        """The state cannot be put away, or (`lasting`) never could be: go on as it was."""
        plan = self._transaction.record.plan
        if plan is None or not plan.puts_away or self._stopping.stop is not None:
            return
        self._no_room, self._lasting = why, lasting
        self._stopping.begin(self._transaction.now, reason=LAYOUT)

    def _take_effect(self, plan: GenerationPlan, change: LayoutChange) -> None:
        transaction = self._transaction
        assert change.kept is not None
        transaction.change(change=change, layout_s=self._measured(plan))
        source = self._snapshots.serving(change.kept[2])
        assert source is not None
        self._recent.append(transaction.now)
        self._progress.layout_changes()
        decision = Decision(kind=DecisionKind.ROLLBACK, applied=source.step, source=source)
        self.replace_all(change.after, decision)

    def replace_all(self, layout: Layout, decision: Decision | None) -> None:
        """Have another layout in force: all workers are replaced, and begin with what was decided, if anything was."""
        transaction = self._transaction
        self._in_vain.clear()
        self._departures.all_over()
        # (that standbys were warm is over as well, and none of them has failed)
        cold = tuple(msgspec.structs.replace(one, tries=0, ready=False) for one in transaction.record.standbys)
        transaction.change(
            layout=layout,
            standbys=cold,
            config={},  # (it says how the model is spread: the next worker says it anew)
            bases=(),  # (nothing else that lies in memory can be read under another layout)
            plan=None,
            pending=None,
            passed=(),
            decision=decision,
        )
        self._absences.replace_workers(list(transaction.members.nodes), f"another layout: {describe_layout(layout)}")

    def from_memory(self, decision: Decision) -> bool:
        """Tell whether a decision goes back to what was put away for the layout in force: then nothing is undone."""
        change = self._transaction.record.change
        return change is not None and _is_kept(decision, change.kept)

    @property
    def needed(self) -> Collection[str]:
        """The nodes without which what was put away is not whole: nobody who is here has all of it."""
        change = self._transaction.record.change
        if change is None or change.kept is None or self._transaction.record.plan is not None:
            return ()
        return self._transaction.record.stash_nodes if self._snapshots.serving(change.kept[2]) is None else ()

    def over(self) -> None:
        """Steps are committed: a change that has led to them is over."""
        change = self._transaction.record.change
        if change is not None and change.kept is not None and self._progress.ledger.committed > change.kept[2]:
            worked = (one for one in self._transaction.record.failed_layouts if one.layout != change.after)
            self._transaction.change(failed_layouts=tuple(worked))
            self.is_over(change, change.why)

    def is_over(self, change: LayoutChange, why: str) -> None:
        """Tell what a change has cost, but where all went back to the layout before."""
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
        self._told = None

    def _nodes(self, plan: GenerationPlan) -> list[str]:
        return list(dict.fromkeys(member.node for member in plan.members))


def _is_kept(decision: Decision, kept: SnapshotKey | None) -> bool:
    source = decision.source
    return kept is not None and isinstance(source, SnapshotSource) and source.everywhere and source.part(0).key == kept
