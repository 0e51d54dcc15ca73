"""Mutants of what is decided about snapshots in the memory of nodes."""

from __future__ import annotations

from mutant import Mutant

BOOK = "coordination/snapshots/book.py"
NEAREST = "coordination/snapshots/nearest.py"
HELD = "coordination/agent/held_snapshots.py"

SNAPSHOT_MUTANTS = (
    Mutant(
        name="snapshot_serves_without_all_of_its_parts",
        file=BOOK,
        old="        return len(self.holders) == self.example.parts\n",
        new="        return len(self.holders) > 0\n",
        why="a state is made of all parts",
    ),
    Mutant(
        name="snapshot_of_an_undone_step_serves",
        file=BOOK,
        old="    return all(part.step <= step for generation, step in bases if generation > part.generation)\n",
        new="    return True\n",
        why="what the job has gone back behind was done again, perhaps otherwise",
    ),
    Mutant(
        name="snapshot_of_a_step_that_nobody_announced_serves",
        file=BOOK,
        old="if one.example.step <= committed)",
        new="if True)",
        why="its loss and its samples would be in no journal",
    ),
    Mutant(
        name="snapshot_that_cannot_be_read_is_tried_for_ever",
        file=BOOK,
        old="            self._bad[copy] = None\n",
        new="            pass\n",
        why="each source is tried once",
    ),
    Mutant(
        name="snapshot_serves_where_a_checkpoint_is_nearer",
        file=NEAREST,
        old="        if live or verdict.decision.applied > snapshot.step:\n",
        new="        if live:\n",
        why="the nearest step is gone back to",
    ),
    Mutant(
        name="snapshot_serves_although_somebody_has_the_state",
        file=NEAREST,
        old="        if live or verdict.decision.applied > snapshot.step:\n",
        new="        if verdict.decision.applied > snapshot.step:\n",
        why="with a live copy nothing is undone",
    ),
    Mutant(
        name="agent_keeps_one_snapshot_alone",
        file=HELD,
        old="GENERATIONS = 2\n",
        new="GENERATIONS = 1\n",
        why="while the newest is not complete everywhere, the one before serves",
    ),
)
