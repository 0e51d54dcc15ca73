"""A layout that a script does not live under: it is too large for memory, or fails before its first step is committed.

Then nothing of what was put away for the change to it is lost: all go on from that, under another layout, or under the
one before. That is told with what has failed, and the layout is not tried again soon.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.generations.stopping import Stopping
from holdfast.coordination.layouts.changing import RECENT_S, LayoutChanges
from holdfast.coordination.membership import Node
from holdfast.coordination.progress.announced import Progress
from holdfast.coordination.roles import UnitName, unit_of
from holdfast.coordination.turn import Transaction
from holdfast.errors import EXIT_BAD_INPUT
from holdfast.protocol.events import LayoutKept
from holdfast.protocol.layouts.layout import Layout
from holdfast.protocol.layouts.several import FailedLayout, LayoutChange, describe_layout, have_node_counts
from holdfast.protocol.messages.agent import WorkerDown
from holdfast.protocol.messages.worker import ScriptError
from holdfast.protocol.names import node_and_index_of, node_of
from holdfast.protocol.plan import Decision
from holdfast.protocol.state import SnapshotKey

#: how what scripts raise begins, where memory was too small
_NO_MEMORY = ("OutOfMemoryError", "MemoryError")
#: a unit whose processes end so often, before a step is committed, does so because of the layout
_TOO_OFTEN = 2
#: workers have so long to come up, and so many times as long as any took before
_COME_S, _TIMES = 600.0, 3.0
#: a layout is tried again after `RECENT_S`, and twice as long each time it fails again, so often
_MOST_DOUBLED = 6


class FailingLayouts:
    """Asked wherever the job is to fail, or a process has ended."""

    def __init__(
        self,
        transaction: Transaction,
        config: CoordinatorConfig,
        progress: Progress,
        stopping: Stopping,
        changes: LayoutChanges,
    ) -> None:
        self._transaction, self._config = transaction, config
        self._progress, self._stopping = progress, stopping
        self._changes = changes
        #: which processes have ended since this state was put away, and how often each unit has by that
        self._since: SnapshotKey | None = None
        self._ended: list[str] = []
        self._ends: Counter[UnitName] = Counter()
        #: the nodes that were told of it, or are known to have come since, after all went back
        self._replaced: set[str] = set()
        #: the longest that a node's workers have taken to come up
        self._longest_s = 0.0

    def begin(self) -> None:
        """This run begins: its script may be another one than that which failed."""
        if self._transaction.record.failed_layouts and not self._config.takeover:
            self._transaction.change(failed_layouts=())

    # ---- one under which nobody comes ----

    def came(self, node: Node) -> None:
        """All workers of a node run."""
        if self._transaction.record.plan is None:  # (else one of them may have followed another)
            self._longest_s = max(self._longest_s, self._transaction.now - node.came)

    def tick(self) -> None:
        """Time has passed: undo a change after which the workers of a node that is here do not come up."""
        transaction, limit_s = self._transaction, max(_COME_S, _TIMES * self._longest_s)
        if transaction.record.plan is not None or not transaction.record.stashed_step:
            return
        for node in transaction.members.regular:
            if not node.complete and transaction.now - node.came > limit_s:
                self.goes_back(f"the workers of node {node.name} did not come to job.protect() within {limit_s:.0f} s")
                return

    # ---- one that fails ----

    def goes_back(self, why: str) -> bool:
        """The job cannot go on, for this reason: where a change of layout has led there, that is undone.

        Returns:
            Whether all workers are replaced, to go on under the layout before. At once: no step is committed under the
            other, and what it began with is in the memory of the nodes.
        """
        transaction, change, source = self._transaction, self._transaction.record.change, self._source
        if change is None or source is None or change.after == change.before:
            return False
        failed, wait_s = self._note_failed(change.after)
        self._transaction.emit(
            LayoutKept,
            layout=describe_layout(change.before),
            nodes=change.nodes,
            why=(
                f"under {describe_layout(failed)} the job failed before its first step: {why}; all go back to "
                f"{describe_layout(change.before)}, to step {source.applied}, as it was put away, and "
                f"{describe_layout(failed)} is not tried again for {wait_s / 60:.0f} minutes"
            ),
        )
        transaction.change(change=msgspec.structs.replace(change, after=change.before))
        self._replaced = set(transaction.members.nodes)
        self._begin_anew(change.before, source)
        return True

    def ended(self, down: WorkerDown) -> bool:
        """A process has ended, and not left its loop: undo the change where that is for good, or comes too often.

        Returns:
            Whether that is all that comes of it.
        """
        if self._is_of_before(node_of(down.worker)):
            return True
        if not down.has_left_loop and (down.final or down.exit_code == EXIT_BAD_INPUT) and self.goes_back(down.detail):
            return True
        return not down.has_left_loop and self.again(down.worker, down.detail)

    def _is_of_before(self, name: str) -> bool:
        """Tell whether a node, after all went back, still has workers of the other layout: then they are replaced.

        It was away when all were told, or the coordinator before this one has died meanwhile.
        """
        record = self._transaction.record
        change = record.change
        went_back = change is not None and change.kept is not None and change.before == change.after
        if not went_back or record.plan is not None or name in self._replaced:
            return False
        self._replaced.add(name)
        self._changes.replace_on(name)
        return True

    def again(self, worker: str, why: str) -> bool:
        """A process is to be replaced: undo the change where that comes too often; tell whether it was."""
        change = self._transaction.record.change
        kept = change.kept if change is not None else None
        if kept is None:
            return False
        if kept != self._since:
            self._since, self._ended, self._ends = kept, [], Counter()
        unit = unit_of(worker, self._transaction.record.layout.places)
        here = [one for one in self._ended if node_and_index_of(one) == node_and_index_of(worker)]
        if worker in here:
            return False
        self._ended.append(worker)
        if len(here) < self._ends[unit]:
            return False  # (it goes with the one that was told of)
        self._ends[unit] += 1
        enough = max(1, min(_TOO_OFTEN, self._config.spec.recovery.max_restarts))
        return self._ends[unit] >= enough and self.goes_back(f"{self._transaction.place_of(worker)}: {why}")

    @property
    def _source(self) -> Decision | None:
        """The decision to begin with what was put away, as long as nothing came of it; None: nothing was, or it has."""
        transaction, change = self._transaction, self._transaction.record.change
        kept = change.kept if change is not None else None
        ledger, decision = self._progress.ledger, transaction.record.decision
        if kept is None or decision is None or ledger.knows(kept[2] + 1):
            return None
        return decision if self._changes.from_memory(decision) else None

    def _note_failed(self, layout: Layout) -> tuple[Layout, float]:
        """Keep that a layout has failed; return it, and for how long it is not tried."""
        before = self._transaction.record.failed_layouts
        tries = 1 + next((one.tries for one in before if one.layout == layout), 0)
        wait_s = RECENT_S * 2 ** min(tries - 1, _MOST_DOUBLED)
        entry = FailedLayout(layout=layout, until=self._transaction.now + wait_s, tries=tries)
        others = (one for one in before if one.layout != layout)
        self._transaction.change(failed_layouts=(*others, entry))
        return layout, wait_s

    def _begin_anew(self, layout: Layout, source: Decision | None) -> None:
        self._stopping.end()
        self._progress.restarts()
        self._changes.replace_all(layout, source)

    # ---- one that does not fit ----

    def ran_out(self, error: ScriptError) -> bool:
        """A script has raised this: where memory was too small for the layout in force, that is chosen no more.

        Returns:
            Whether all workers are replaced, for another one: at once as long as no step is committed under it, or none
            has a state. (Later the change is one like any other, as soon as all train again.)
        """
        transaction, record = self._transaction, self._transaction.record
        if not record.layouts or have_node_counts(record.layouts) or not error.place.startswith(_NO_MEMORY):
            return False
        if record.layout not in record.too_large:
            transaction.change(too_large=(*record.too_large, record.layout))
        others = [one.layout for one in record.layouts if one.layout not in transaction.record.too_large]
        change, nodes = record.change, len(transaction.members.regular)
        since = change.kept[2] if change is not None and change.kept is not None else 0
        lives = self._progress.ledger.committed > since and record.plan is not None
        if not others or lives or self._config.spec.recovery.restarts_all:
            return False
        choice, decision = self._changes.choose(nodes, {}), record.decision
        source = decision if decision is not None and self._changes.from_memory(decision) else None
        if source is not None and change is not None:
            transaction.change(change=msgspec.structs.replace(change, after=choice.layout, why=choice.why))
            if choice.layout == change.before:
                transaction.emit(LayoutKept, layout=describe_layout(choice.layout), nodes=change.nodes, why=choice.why)
        else:
            change = LayoutChange(
                before=record.layout, after=choice.layout, why=choice.why, nodes=nodes, since=transaction.now
            )
            self._changes.is_over(change, choice.why)
        self._begin_anew(choice.layout, source)
        return True

    def fits_elsewhere(self, error: ScriptError) -> bool:
        """All run out of memory by this after some steps: tell whether the job can be saved, to begin under another."""
        record = self._transaction.record
        listed = record.saves and not have_node_counts(record.layouts) and error.place.startswith(_NO_MEMORY)
        return listed and any(one.layout not in record.too_large for one in record.layouts)

    def leaves(self) -> bool:
        """All begin again from what was saved: under another layout, where the one in force is too large."""
        transaction, record = self._transaction, self._transaction.record
        if not record.layouts or record.layout not in record.too_large:
            return False
        nodes = len(transaction.members.regular)
        choice = self._changes.choose(nodes, {})
        if choice.layout == record.layout:
            return False
        before, after, why = record.layout, choice.layout, choice.why
        self._changes.is_over(
            LayoutChange(before=before, after=after, why=why, nodes=nodes, since=transaction.now), why
        )
        self._begin_anew(after, None)
        return True
