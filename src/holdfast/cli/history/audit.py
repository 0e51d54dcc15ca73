"""`holdfast audit`: whether a job's journal proves that each sample of each step counted exactly once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import typer

from holdfast.cli.connection import Server
from holdfast.cli.following.events import EventsFile, read_job_events
from holdfast.cli.following.progress import count
from holdfast.cli.options import with_option_groups
from holdfast.cli.output import AsJson, on_one_line, print_json, print_line
from holdfast.documents import open_given
from holdfast.errors import EXIT_FAILED, BadInputError
from holdfast.observability.history.audit import AuditResult, FindingSubject, audit_events, audit_lines

#: findings that are printed; all of them are in the JSON
MOST = 20


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("audit")(with_option_groups(audit))


def audit(events: EventsFile = None, as_json: AsJson = False, *, server: Server) -> None:
    """Prove that each sample counted exactly once. If the events do not prove it, the exit code is 1."""
    result = audit_events(read_job_events(None, server)) if events is None else audit_file(events)
    if as_json:
        print_json({"sound": result.sound, **asdict(result)})
    else:
        for line in audit_as_text(result):
            print_line(line)
    if not result.sound:
        raise typer.Exit(EXIT_FAILED)


def audit_file(path: Path) -> AuditResult:
    """Audit an event file, line by line.

    Raises:
        BadInputError: the file cannot be read, or no line of it is an event.
    """
    try:
        with open_given(path) as file:
            result = audit_lines(file)
    except OSError as error:
        raise BadInputError(f"{path} cannot be read as an event file: {error.strerror}") from None
    if not result.events:
        raise BadInputError(f"{path} holds no event: give the file that --events wrote")
    return result


def audit_as_text(result: AuditResult) -> Iterator[str]:
    """Yield the result as people read it: totals, proven and skipped samples, lost events, findings, and the verdict.

    At most `MOST` skips and `MOST` findings are listed.
    """
    facts = (count(result.events, "event"), count(result.steps, "step"), count(result.samples, "sample"))
    yield f"{on_one_line(result.job)}: {result.outcome}; {', '.join(facts)}"
    proven = count(result.proven, "step")
    yield f"{proven} had each micro-batch exactly once, by the sum of hashes that each was committed with"
    if result.skipped_samples:
        yield f"{result.skipped_samples} of the samples were left out of their steps by the script (step.skip)"
    for step, micro_batch, reason in result.skips[:MOST]:
        yield on_one_line(f"step {step}, micro-batch {micro_batch}: skipped: {reason}")
    if len(result.skips) > MOST:
        yield f"and {len(result.skips) - MOST} more; --json has all of them"
    if result.unproven:
        why = "no remaining worker knew their sums, their events are lost, or an earlier version wrote them"
        yield f"{count(result.unproven, 'step')} cannot be proven: {why}"
    if result.lost_events:
        yield f"{count(result.lost_events, 'event')} lost; journal_repaired stands for them"
    if result.undone:
        yield f"{count(result.undone, 'step')} undone by roll-backs: these do not count"
    if result.outcome == "running":
        yield "the last event does not end the job: the job still runs, or the file is cut off"
    for finding in result.findings[:MOST]:
        seq = f" (event {finding.seq})" if finding.about is not FindingSubject.LINE else ""
        yield on_one_line(f"line {finding.line}{seq}: {finding.what}")
    if len(result.findings) > MOST:
        yield f"and {len(result.findings) - MOST} more; --json has all of them"
    errors = len(result.findings)
    what = "1 error, which is" if errors == 1 else f"{errors} errors, which are"
    yield "sound" if result.sound else f"NOT SOUND: the events have {what} described above"
