"""Mutants of decisions about snapshots in the memory of nodes."""

from __future__ import annotations

from mutant import Mutant

BOOK = "coordination.snapshots.book"
DECISIONS = "coordination.generations.decisions"
HELD = "coordination.agent.held_snapshots"

SNAPSHOT_MUTANTS = (
    Mutant(
        name="snapshot_serves_without_all_of_its_parts",
        module=BOOK,
        qualname="_Held.complete",
        old="len(self.holders) == self.example.parts",
        new="len(self.holders) > 0",
        why="a state consists of all parts",
    ),
    Mutant(
        name="snapshot_of_an_undone_step_serves",
        module=BOOK,
        qualname="on_lineage",
        old="all((part.step <= step for generation, step in bases if generation > part.generation))",
        new="True",
        why="a step undone by a rollback was repeated, perhaps with another result",
    ),
    Mutant(
        name="snapshot_of_a_step_that_nobody_announced_serves",
        module=BOOK,
        qualname="SnapshotBook.find_newest",
        old="one.example.step <= committed",
        new="True",
        why="its loss and its samples would be in no journal",
    ),
    Mutant(
        name="snapshot_that_cannot_be_read_is_tried_for_ever",
        module=BOOK,
        qualname="SnapshotBook._on_snapshot_damaged",
        old="self._bad[copy] = None",
        new="pass",
        why="each source must be tried only once",
    ),
    Mutant(
        name="snapshot_serves_where_a_checkpoint_is_nearer",
        module=DECISIONS,
        qualname="prefer_snapshot",
        old="live or verdict.decision.applied > snapshot.step",
        new="live",
        why="the job must roll back to the newest available step",
    ),
    Mutant(
        name="snapshot_serves_although_somebody_has_the_state",
        module=DECISIONS,
        qualname="prefer_snapshot",
        old="live or verdict.decision.applied > snapshot.step",
        new="verdict.decision.applied > snapshot.step",
        why="with a live copy no step is undone",
    ),
    Mutant(
        name="agent_keeps_one_snapshot_alone",
        module=HELD,
        old="2",
        new="1",
        why="while the newest snapshot is incomplete elsewhere, the previous one serves",
    ),
)
