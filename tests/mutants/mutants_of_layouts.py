"""Mutants of several layouts: when one takes another's place, and from where its workers begin."""

from __future__ import annotations

from mutant import Mutant

CHANGING = "coordination/layouts/changing.py"
BOOK = "coordination/snapshots/book.py"
FAILING = "coordination/layouts/failing.py"

LAYOUT_MUTANTS = (
    Mutant(
        name="workers_of_the_layout_before_stay",
        file=CHANGING,
        old='        self._absences.replace_workers(list(turn.members.nodes), f"another layout: {said_so(layout)}")\n',
        new="",
        why="their models are spread in another way",
    ),
    Mutant(
        name="the_layout_changes_before_all_have_entered",
        file=CHANGING,
        old="        if not turn.members.entered(plan) or committed < decision.applied:\n            return\n",
        new="",
        why="the step whose state lies there is not announced, so that it never serves",
    ),
    Mutant(
        name="one_node_that_has_the_state_is_enough_for_the_change",
        file=BOOK,
        old="        return all(\n            told is not None and len([part",
        new="        return any(\n            told is not None and len([part",
        why="whoever loses that node has lost all",
    ),
    Mutant(
        name="snapshots_of_the_layout_before_serve",
        file=CHANGING,
        old="            bases=(),  # (nothing else that lies in memory can be read under another layout)\n",
        new="",
        why="their parts are those of other roles",
    ),
    Mutant(
        name="what_was_put_away_is_forgotten_with_the_change",
        file=BOOK,
        old="        return change is not None and part.key == change.kept\n",
        new="        return False\n",
        why="it is all that the job has until its next workers have read it",
    ),
    Mutant(
        name="a_layout_that_failed_is_tried_again_at_once",
        file=FAILING,
        old="        self._turn.change(failed_layouts=(*others, entry))\n",
        new="",
        why="the job would change to and fro, and train for two seconds in between",
    ),
    Mutant(
        name="all_go_back_once_more_from_where_they_went_back_to",
        file=FAILING,
        old=" or change.after == change.before:\n",
        new=":\n",
        why="a script that fails under both would never end",
    ),
    Mutant(
        name="steps_done_under_a_layout_are_undone_with_it",
        file=FAILING,
        old=" or ledger.knows(kept[2] + 1):\n",
        new=":\n",
        why="others may have counted what has passed",
    ),
    Mutant(
        name="what_a_script_stands_in_the_way_of_is_tried_each_minute",
        file=CHANGING,
        old="            self._in_vain.add((change.nodes, change.after))\n",
        new="",
        why="all are stopped for nothing, again and again",
    ),
)
