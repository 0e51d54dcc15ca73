"""Mutants of a worker's memory of attempts and states, and of output files on a full disk."""

from __future__ import annotations

from mutant import Mutant

OUTPUT_MUTANTS = (
    Mutant(
        name="notes_are_not_restarted",
        module="runtime.gradients.workload",
        qualname="Workload.start_step",
        old="self._notes.on_attempt_start()",
        new="pass",
        why="values logged in an abandoned attempt would count again",
        tests=("runtime/groups/test_noted_steps.py",),
    ),
    Mutant(
        name="evaluations_outlive_their_state",
        module="runtime.session.applying",
        qualname="StepApplier.on_state_replaced",
        old="self._evaluator.on_state_replaced()",
        new="pass",
        why="the best checkpoint would be chosen by the result of another state",
        tests=("runtime/groups/test_state_replaced.py",),
    ),
    Mutant(
        name="events_are_dropped_by_a_full_disk",
        module="observability.journal_file",
        qualname="FileJournal._write",
        old="self._pending.append((seq, line))",
        new="self._pending = [(seq, line)]",
        why="the events file would have a gap after space is available again",
        tests=("observability/test_journal.py",),
    ),
    Mutant(
        name="a_full_disk_is_reported_at_every_event",
        module="observability.journal_file",
        qualname="FileJournal._note_failure",
        old="self._reported = True",
        new="pass",
        why="each report is an event, which cannot be written either",
        tests=("observability/test_journal.py",),
    ),
    Mutant(
        name="half_a_row_stays",
        module="observability.metric_rows",
        qualname="LineFile.amend",
        old="lines + tail[end:]",
        new="lines",
        why="rows of later steps would be lost when an evaluation is added",
        tests=("observability/test_metric_rows.py", "cli/job/test_metrics_file.py"),
    ),
    Mutant(
        name="a_cut_log_says_nothing",
        module="control.output_relay",
        qualname="OutputRelay._write_log",
        old="log.lost, log.why = (log.lost + len(lines), error.strerror or str(error))",
        new="log.why = error.strerror or str(error)",
        why="missing lines would go unnoticed",
        tests=("control/test_output_relay.py",),
    ),
)
