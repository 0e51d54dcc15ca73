"""Mutants of what a worker remembers of an attempt or a state, and of output files on a full disk."""

from __future__ import annotations

from mutant import Mutant

OUTPUT_MUTANTS = (
    Mutant(
        name="notes_are_not_restarted",
        file="runtime/gradients/workload.py",
        old="        self._notes.restart()\n",
        new="",
        why="values that were logged in an attempt that was left count again",
        tests=("runtime/groups/test_noted_steps.py",),
    ),
    Mutant(
        name="evaluations_outlive_their_state",
        file="runtime/session/applying.py",
        old="        self._evaluating.forget()\n",
        new="",
        why="the best checkpoint is chosen by what another state came to",
        tests=("runtime/groups/test_state_replaced.py",),
    ),
    Mutant(
        name="events_are_dropped_by_a_full_disk",
        file="observability/journal_file.py",
        old="        self._pending.append((seq, line))\n",
        new="        self._pending = [(seq, line)]\n",
        why="the events file has a gap once there is room again",
        tests=("observability/test_journal.py",),
    ),
    Mutant(
        name="a_full_disk_is_reported_at_every_event",
        file="observability/journal_file.py",
        old="            self._reported = True\n",
        new="            pass\n",
        why="each report is an event, which cannot be written either",
        tests=("observability/test_journal.py",),
    ),
    Mutant(
        name="half_a_row_stays",
        file="observability/metric_rows.py",
        old="        self._unwritten = places[0], lines + tail[end:]\n",
        new="        self._unwritten = places[0], lines\n",
        why="rows of later steps are lost when an evaluation is added",
        tests=("observability/test_metric_rows.py", "cli/job/test_metrics_file.py"),
    ),
    Mutant(
        name="a_cut_log_says_nothing",
        file="control/output_relay.py",
        old="            log.lost, log.why = log.lost + len(lines), error.strerror or str(error)\n",
        new="            log.why = error.strerror or str(error)\n",
        why="nobody sees that lines are missing",
        tests=("control/test_output_relay.py",),
    ),
)
