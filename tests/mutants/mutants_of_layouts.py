"""Mutants of layout changes: their time, and the state from which workers begin."""

from __future__ import annotations

from mutant import Mutant

CHANGING = "coordination.layouts.changing"
BOOK = "coordination.snapshots.book"
FAILING = "coordination.layouts.failing"

LAYOUT_MUTANTS = (
    Mutant(
        name="workers_of_the_layout_before_stay",
        module=CHANGING,
        qualname="LayoutChanges.activate_layout",
        old=(
            "self._absences.replace_workers("
            "list(transaction.members.nodes), f'another layout: {describe_layout(layout)}')"
        ),
        new="pass",
        why="their models are sharded differently",
    ),
    Mutant(
        name="the_layout_changes_before_all_have_entered",
        module=CHANGING,
        qualname="LayoutChanges.check_stash",
        old=("if not transaction.members.entered(plan) or committed < decision.applied:\n    return"),
        new="pass",
        why="the step of the stashed state is not announced yet, so that the stash would never serve",
    ),
    Mutant(
        name="one_node_that_has_the_state_is_enough_for_the_change",
        module=BOOK,
        qualname="SnapshotBook.is_stashed_on",
        old="all",
        new="any",
        why="the loss of that node would lose everything",
    ),
    Mutant(
        name="snapshots_of_the_layout_before_serve",
        module=CHANGING,
        qualname="LayoutChanges.activate_layout",
        old=(
            "transaction.change(layout=layout, standbys=cold, config={}, bases=(), plan=None, pending=None, "
            "passed=(), decision=decision)"
        ),
        new=(
            "transaction.change(layout=layout, standbys=cold, config={}, plan=None, pending=None, passed=(), "
            "decision=decision)"
        ),
        why="their parts belong to other roles",
    ),
    Mutant(
        name="what_was_put_away_is_forgotten_with_the_change",
        module=BOOK,
        qualname="_is_of_use",
        old="change is not None and part.key == change.kept",
        new="False",
        why="until the next workers have read it, the stash is the only copy of the state",
    ),
    Mutant(
        name="a_layout_that_failed_is_tried_again_at_once",
        module=FAILING,
        qualname="FailingLayouts._record_failure",
        old="self._transaction.change(failed_layouts=(*others, entry))",
        new="pass",
        why="the job would alternate between layouts, and train for two seconds in between",
    ),
    Mutant(
        name="all_go_back_once_more_from_where_they_went_back_to",
        module=FAILING,
        qualname="FailingLayouts.revert_change",
        old="change is None or source is None or change.after == change.before",
        new="change is None or source is None",
        why="a script that fails under both layouts would never end",
    ),
    Mutant(
        name="steps_done_under_a_layout_are_undone_with_it",
        module=FAILING,
        qualname="FailingLayouts._source",
        old="kept is None or decision is None or ledger.knows(kept[2] + 1)",
        new="kept is None or decision is None",
        why="other workers may have counted a passed step",
    ),
    Mutant(
        name="what_a_script_stands_in_the_way_of_is_tried_each_minute",
        module=CHANGING,
        qualname="LayoutChanges._undo",
        old="self._impossible.add((change.nodes, change.after))",
        new="pass",
        why="all workers would stop repeatedly for nothing",
    ),
)
