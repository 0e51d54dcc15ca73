"""Reverts a layout under which the script fails: it does not fit into memory, or fails before its first committed step.

The stash of the change is still there. All workers continue from it under another layout, or under the one before. The
event names the failure, and the layout is not tried again soon.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.generations.interruption import Interruption
from holdfast.coordination.layouts.changing import RECENT_S, LayoutChanges
from holdfast.coordination.membership import Node
from holdfast.coordination.progress.announced import Progress
from holdfast.coordination.roles import UnitName, unit_of
from holdfast.coordination.transaction import Transaction
from holdfast.errors import EXIT_BAD_INPUT
from holdfast.protocol.events import LayoutKept
from holdfast.protocol.layouts.layout import Layout
from holdfast.protocol.layouts.layout_list import FailedLayout, LayoutChange, describe_layout, have_node_counts
from holdfast.protocol.messages.agent import WorkerDown
from holdfast.protocol.messages.worker import ScriptError
from holdfast.protocol.names import node_and_index_of, node_of
from holdfast.protocol.plan import Decision
from holdfast.protocol.state import SnapshotKey

#: beginnings of the exceptions for too little memory
_NO_MEMORY = ("OutOfMemoryError", "MemoryError")
#: how often the processes of a replica group end before a commit until the layout counts as the cause
_TOO_OFTEN = 2
#: least time limit for workers to start, seconds
_START_LIMIT_S = 600.0
#: that limit as a multiple of the longest start so far
_START_FACTOR = 3.0
#: A failed layout is tried again after `RECENT_S`. Each further failure doubles that, at most this many times.
_MOST_DOUBLED = 6


class FailingLayouts:
    """Reverts changes of layout when the job would fail, or a process has ended."""

    def __init__(
        self,
        transaction: Transaction,
        config: CoordinatorConfig,
        progress: Progress,
        stopping: Interruption,
        changes: LayoutChanges,
    ) -> None:
        self._transaction = transaction
        self._config = config
        self._progress = progress
        self._stopping = stopping
        self._changes = changes
        #: the stash since which ends of processes count
        self._since: SnapshotKey | None = None
        #: processes that have ended since
        self._ended: list[str] = []
        #: how often each replica group has lost processes by that
        self._ends: Counter[UnitName] = Counter()
        #: nodes with replaced workers since the last revert
        self._replaced: set[str] = set()
        #: the longest that a node's workers have taken to come up
        self._longest_s = 0.0

    def on_start(self) -> None:
        """Forget failed layouts when a new run starts: its script may have changed."""
        if self._transaction.record.failed_layouts and not self._config.takeover:
            self._transaction.change(failed_layouts=())

    # ---- layouts under which workers do not start ----

    def on_node_complete(self, node: Node) -> None:
        """Learn from a node with all workers how long they take to start, while no generation is in force."""
        if self._transaction.record.plan is None:  # Otherwise one of them may be a replacement.
            self._longest_s = max(self._longest_s, self._transaction.now - node.came)

    def tick(self) -> None:
        """Revert a change if the workers of a connected node do not start in time: in 10 minutes, or 3 times the
        longest start.

        Only while a stash waits for its workers.
        """
        transaction, limit_s = self._transaction, max(_START_LIMIT_S, _START_FACTOR * self._longest_s)
        if transaction.record.plan is not None or not transaction.record.stashed_step:
            return
        for node in transaction.members.regular:
            if not node.complete and transaction.now - node.came > limit_s:
                self.revert_change(
                    f"the workers of node {node.name} did not come to job.protect() within {limit_s:.0f} s"
                )
                return

    # ---- layouts that fail ----

    def revert_change(self, why: str) -> bool:
        """Revert the change of layout that has led to a failure, if there is one and no step is committed since.

        Emits why. The job continues from the stash in node memory, and the failed layout is not chosen for some
        minutes, longer each time.

        Returns:
            Whether all workers are replaced, to continue under the layout before.
        """
        transaction, change, source = self._transaction, self._transaction.record.change, self._source
        if change is None or source is None or change.after == change.before:
            return False
        failed, wait_s = self._record_failure(change.after)
        self._transaction.emit(
            LayoutKept,
            layout=describe_layout(change.before),
            nodes=change.nodes,
            why=(
                f"under {describe_layout(failed)} the job failed before its first step: {why}; all go back to "
                f"{describe_layout(change.before)}, to the stashed step {source.applied}, and "
                f"{describe_layout(failed)} is not tried again for {wait_s / 60:.0f} minutes"
            ),
        )
        transaction.change(change=msgspec.structs.replace(change, after=change.before))
        self._replaced = set(transaction.members.nodes)
        self._restart(change.before, source)
        return True

    def on_worker_down(self, down: WorkerDown) -> bool:
        """Handle the end of a process during a change of layout.

        Workers that still have a reverted layout are replaced. Otherwise, unless the script left its loop, a permanent
        end, or too many ends, reverts the change.

        Returns:
            Whether nothing else must be done.
        """
        if self._replace_if_outdated(node_of(down.worker)):
            return True
        if (
            not down.has_left_loop
            and (down.final or down.exit_code == EXIT_BAD_INPUT)
            and self.revert_change(down.detail)
        ):
            return True
        return not down.has_left_loop and self.on_replacement(down.worker, down.detail)

    def _replace_if_outdated(self, name: str) -> bool:
        """Replace the workers of a node, once, after the job has returned to the previous layout; return whether that
        was done now.

        They may still have the reverted layout, because the node was disconnected during the revert, or a new
        coordinator has started since. False if no change was reverted, once a generation has started, or if they were
        replaced before.
        """
        record = self._transaction.record
        change = record.change
        went_back = change is not None and change.kept is not None and change.before == change.after
        if not went_back or record.plan is not None or name in self._replaced:
            return False
        self._replaced.add(name)
        self._changes.replace_workers_on(name)
        return True

    def on_replacement(self, worker: str, why: str) -> bool:
        """Count the loss of a process since the last stash; revert the change if its replica group has lost too many.
        Without a stash, nothing is counted.

        Processes of a group that end together count once, and so does a process that is reported twice.

        Returns:
            Whether the change is reverted.
        """
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
            return False  # It ended together with the one counted before.
        self._ends[unit] += 1
        enough = max(1, min(_TOO_OFTEN, self._config.spec.recovery.max_restarts))
        return self._ends[unit] >= enough and self.revert_change(f"{self._transaction.place_of(worker)}: {why}")

    @property
    def _source(self) -> Decision | None:
        """The decision to start with the stash, while no step was committed after it; else None."""
        transaction, change = self._transaction, self._transaction.record.change
        kept = change.kept if change is not None else None
        ledger, decision = self._progress.ledger, transaction.record.decision
        if kept is None or decision is None or ledger.knows(kept[2] + 1):
            return None
        return decision if self._changes.is_from_stash(decision) else None

    def _record_failure(self, layout: Layout) -> tuple[Layout, float]:
        """Record that a layout has failed; return it, and the seconds until it may be chosen again.

        These are 600 after its first failure, and double with each further one, up to a limit.
        """
        before = self._transaction.record.failed_layouts
        tries = 1 + next((one.tries for one in before if one.layout == layout), 0)
        wait_s = RECENT_S * 2 ** min(tries - 1, _MOST_DOUBLED)
        entry = FailedLayout(layout=layout, until=self._transaction.now + wait_s, tries=tries)
        others = (one for one in before if one.layout != layout)
        self._transaction.change(failed_layouts=(*others, entry))
        return layout, wait_s

    def _restart(self, layout: Layout, source: Decision | None) -> None:
        """Replace all workers, to start under another layout from `source`, or from saved state if that is None."""
        self._stopping.end()
        self._progress.mark_restart()
        self._changes.activate_layout(layout, source)

    # ---- layouts that do not fit into memory ----

    def on_script_error(self, error: ScriptError) -> bool:
        """Handle an exception of the script: if memory was too small, do not choose the current layout again.

        If no step is committed under it, or no worker has a state, and another layout is left, all workers are replaced
        at once. Otherwise the change follows like any other, once all members train again; in a job that restarts all
        workers after failures, with the next restart. Ignored if the script assigns layouts to numbers of nodes.

        Returns:
            Whether all workers are replaced.
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
        source = decision if decision is not None and self._changes.is_from_stash(decision) else None
        if source is not None and change is not None:
            transaction.change(change=msgspec.structs.replace(change, after=choice.layout, why=choice.why))
            if choice.layout == change.before:
                transaction.emit(LayoutKept, layout=describe_layout(choice.layout), nodes=change.nodes, why=choice.why)
        else:
            change = LayoutChange(
                before=record.layout, after=choice.layout, why=choice.why, nodes=nodes, since=transaction.now
            )
            self._changes.finish_change(change, choice.why)
        self._restart(choice.layout, source)
        return True

    def can_fit_elsewhere(self, error: ScriptError) -> bool:
        """Return whether the job can be saved to restart under another layout, because memory was too small for the
        script.

        The job must save, and have a layout that is not too large; the script must not assign layouts to numbers of
        nodes.
        """
        record = self._transaction.record
        listed = record.saves and not have_node_counts(record.layouts) and error.place.startswith(_NO_MEMORY)
        return listed and any(one.layout not in record.too_large for one in record.layouts)

    def leave_too_large(self) -> bool:
        """Switch all workers to another layout if the current one is too large and another can be chosen; return
        whether they switch.

        Called when all workers restart from a checkpoint.
        """
        transaction, record = self._transaction, self._transaction.record
        if not record.layouts or record.layout not in record.too_large:
            return False
        nodes = len(transaction.members.regular)
        choice = self._changes.choose(nodes, {})
        if choice.layout == record.layout:
            return False
        before, after, why = record.layout, choice.layout, choice.why
        self._changes.finish_change(
            LayoutChange(before=before, after=after, why=why, nodes=nodes, since=transaction.now), why
        )
        self._restart(after, None)
        return True
