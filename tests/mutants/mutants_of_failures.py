"""Mutants of what is done about failures: classes, budgets, scripts that raise."""

from __future__ import annotations

from mutant import Mutant

BLAME = "coordination/failures/blame.py"
DECIDING = "coordination/generations/deciding.py"
MACHINE = "coordination/worker/machine.py"
CLOSING = "coordination/closing.py"

FAILURE_MUTANTS = (
    Mutant(
        name="raisers_are_let_go_at_once",
        file=DECIDING,
        old="            if not holders or lost_of(self._turn.record, others, reports):\n",
        new="            if False:\n",
        why="where all scripts raise, what they have is nowhere else",
    ),
    Mutant(
        name="raisers_stay_members",
        file=DECIDING,
        old="        raisers = [] if closing else self._raisers.among(stopping.reports)\n",
        new="        raisers: list[str] = []\n",
        why="who has raised computes nothing any more",
        quick=True,
    ),
    Mutant(
        name="raiser_keeps_half_a_gradient",
        file=MACHINE,
        old="        self._kept, self._share.summed = True, []",
        new="        self._kept = True",
        why="what was added up of the micro-batch at hand may be half of it",
    ),
    Mutant(
        name="raiser_keeps_what_changes",
        file=MACHINE,
        old="        if self.applied is None or self.phase not in KEEPING:\n",
        new="        if self.applied is None:\n",
        why="a state that is being changed is nobody's",
    ),
    Mutant(
        name="blame_is_never_the_works",
        file=BLAME,
        old="    if last.step is not None and len(here) > 1:\n",
        new="    if False:\n",
        why="a sample that always raises would take one node after the other",
    ),
    Mutant(
        name="blame_is_at_once_the_works",
        file=BLAME,
        old="    if last.step is not None and len(here) > 1:\n",
        new="    if last.step is not None and len(here) > 0:\n",
        why="one node's exception starts a process again, and ends no job",
        quick=True,
    ),
    Mutant(
        name="blame_anywhere_is_never",
        file=BLAME,
        old="    return anywhere if not machine and len(anywhere) >= min(nodes, ENOUGH) else []\n",
        new="    return []\n",
        why="a line that only the first rank comes to raises on each that becomes it",
    ),
    Mutant(
        name="blame_a_lone_node_never",
        file=BLAME,
        old="        return here if len(at) > 1 else []\n",
        new="        return []\n",
        why="a job of one node would begin again for ever, or lose its node",
    ),
    Mutant(
        name="a_renewed_job_ends",
        file=CLOSING,
        old="        return self.under_way and self._will is not None and self._will.renew\n",
        new="        return False\n",
        why="one exception of the only worker is no reason to end a job",
    ),
    Mutant(
        name="the_last_will_is_not_written",
        file=CLOSING,
        old="        if self._will != record.will:\n",
        new="        if False:\n",
        why="a coordinator that takes over must end the job as it was to end",
    ),
)
