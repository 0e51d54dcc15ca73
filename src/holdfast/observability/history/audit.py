"""Audit whether a job's journal proves that each sample of each step counted exactly once, on one lineage.

The audit recomputes everything that it can. Event and step numbers must follow each other, terms and generations must
grow, and totals must add up. The sum of sample hashes that each commit returned must match the micro-batches of the
step (step_samples). Some facts are lost: a step result that died with all its owners, or events that
`journal_repaired` replaces. Such steps count as unproven and are not a finding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from holdfast.observability.event_lines import NoEventError, decode_event
from holdfast.observability.history.lineage import Lineage
from holdfast.protocol.events import (
    CoordinatorRestarted,
    GenerationStarted,
    JobFailed,
    JobFinished,
    JobStarted,
    JournalRepaired,
    MicroBatchSkipped,
    NodesJoined,
    ReadEvent,
    RolledBack,
    StepCommitted,
    name_of,
)
from holdfast.step_samples import StepSamples


class FindingSubject(StrEnum):
    """The subject of a finding."""

    LINE = "line"  # the line is not an event
    SEQUENCE = "sequence"  # numbers of events, the first and the last one
    TERM = "term"
    GENERATION = "generation"
    STEP = "step"  # a step is missing or duplicate
    TIME = "time"
    ROLL_BACK = "roll_back"
    SAMPLES = "samples"
    TOTALS = "totals"


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditFinding:
    """A contradiction in the journal. Lines count from 1; `seq` is the event's number, or 0 without an event."""

    line: int
    seq: int
    about: FindingSubject
    what: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditResult:
    """The result of an audit."""

    job: str
    #: "running", "finished", "failed" or another outcome of the last `job_finished`. A journal cut after any event
    #: reads as "running".
    outcome: str
    events: int
    #: Number of events that `journal_repaired` replaces.
    lost_events: int
    #: Number of the newest committed step on the lineage.
    steps: int
    #: Steps that are proven to have each micro-batch exactly once.
    proven: int
    #: Steps without a known hash sum, or without an event.
    unproven: int
    #: Steps that were committed and rolled back.
    undone: int
    #: Samples of all steps that count.
    samples: int
    #: Samples that scripts left out of their steps.
    skipped_samples: int
    #: Skipped micro-batches: step, number, reason.
    skips: tuple[tuple[int, int, str], ...]
    findings: tuple[AuditFinding, ...]

    @property
    def sound(self) -> bool:
        """Whether the audit found no contradiction."""
        return not self.findings


class Audit:
    """Checks the events of a journal one by one."""

    def __init__(self) -> None:
        """Start without events."""
        self.findings: list[AuditFinding] = []
        self._lineage = Lineage()
        self._line = 0
        self._events = self._lost = 0
        self._last: ReadEvent | None = None
        #: The number that the next event must have.
        self._next_seq = 1
        self._outcome = "running"
        self._begins_again = False
        #: The current generation, or None if unknown.
        self._generation: int | None = 0
        #: The highest generation so far.
        self._highest = 0
        #: The generation that the previous event announced; 0 for none.
        self._ahead = 0
        self._seed: int | None = None
        self._micro_batches: int | None = None
        self._global_batch: int | None = None
        self._samples: StepSamples | None = None
        #: Skipped samples by step.
        self._skipped: dict[int, int] = {}
        #: Skipped micro-batches: step, number, reason.
        self._skips: list[tuple[int, int, str]] = []

    def check_event(self, event: ReadEvent) -> None:
        """Check the event of the next line against the events so far, and add a finding for each contradiction.

        It checks order, term and generation, and by kind of event: steps and their samples, skipped samples,
        roll-backs, repairs, and totals at the end.
        """
        self._line += 1
        self._events += 1
        self._check_order(event)
        self._check_generation(event)
        match event:
            case StepCommitted():
                self._check_step(event)
            case MicroBatchSkipped():
                self._check_skip(event)
            case RolledBack():
                self._check_roll_back(event)
                self._skipped = {step: count for step, count in self._skipped.items() if step <= event.to_step}
                self._skips = [skip for skip in self._skips if skip[0] <= event.to_step]
            case JournalRepaired():
                self._check_repair(event)
            case GenerationStarted():
                self._check_generation_start(event)
            case JobFinished() | JobFailed():
                self._check_end(event)
            case CoordinatorRestarted():
                # A failed or stopped job continues now. A finished job may start again.
                self._outcome = "running" if self._outcome in ("failed", "stopped") else self._outcome
                self._begins_again = self._outcome == "finished"
            case _:
                pass
        self._lineage.add_event(event)
        self._last = event

    def check_line(self, line: bytes) -> None:
        """Check the next line, including its line break. An incomplete line, or one without an event, is a finding."""
        if not line.endswith(b"\n"):
            self._add_line_finding("it ends in the middle")
            return
        try:
            event = decode_event(line)
        except NoEventError as error:
            self._add_line_finding(f"it is no event ({error})")
            return
        self.check_event(event)

    def result(self) -> AuditResult:
        """Return the proven steps and the findings."""
        lineage = self._lineage
        return AuditResult(
            job=self._last.job if self._last else "",
            outcome=self._outcome,
            events=self._events,
            lost_events=self._lost,
            steps=lineage.position.step,
            proven=lineage.proven,
            unproven=lineage.counted - lineage.proven,
            undone=lineage.undone,
            samples=lineage.position.samples,
            skipped_samples=sum(self._skipped.values()),
            skips=tuple(self._skips),
            findings=tuple(self.findings),
        )

    # ---- Checks ----

    def _add_finding(self, event: ReadEvent | None, about: FindingSubject, what: str) -> None:
        self.findings.append(AuditFinding(line=self._line, seq=event.seq if event else 0, about=about, what=what))

    def _add_line_finding(self, what: str) -> None:
        """Add a finding about a line that is not an event. The line still takes the number of one event."""
        self._line += 1
        self._next_seq += 1  # The line stands for one event.
        self._add_finding(None, FindingSubject.LINE, what)

    def _check_order(self, event: ReadEvent) -> None:
        """Add a finding for an event whose number, job, place in the job, or term does not follow the events before it.

        Event numbers must have no gap, and `job_started` comes first and only once. No step, generation or roll-back
        may follow the end of the job, unless it starts again. A term may only rise, and only with
        `coordinator_restarted`.
        """
        last, first = self._last, event.from_seq if isinstance(event, JournalRepaired) else event.seq
        if first != self._next_seq:
            self._add_finding(event, FindingSubject.SEQUENCE, f"event {first} comes where event {self._next_seq} must")
        self._next_seq = event.seq + 1
        if (last is None) != isinstance(event, JobStarted) and not isinstance(event, JournalRepaired):
            self._add_finding(event, FindingSubject.SEQUENCE, "job_started is the first event, and no other is")
        if last is None:
            return
        if event.job != last.job:
            self._add_finding(
                event, FindingSubject.SEQUENCE, f"it is of job {event.job!r}, the events before it of {last.job!r}"
            )
        if self._begins_again and isinstance(event, GenerationStarted | RolledBack):
            self._begins_again, self._outcome = False, "running"
        if self._outcome != "running" and isinstance(event, StepCommitted | GenerationStarted | RolledBack):
            self._add_finding(
                event, FindingSubject.SEQUENCE, f"{name_of(event)} comes after the job has {self._outcome}"
            )
        if isinstance(event, CoordinatorRestarted) and event.term <= last.term:
            self._add_finding(
                event, FindingSubject.TERM, f"a coordinator of term {event.term} follows one of term {last.term}"
            )
        elif not isinstance(event, CoordinatorRestarted | JournalRepaired) and event.term != last.term:
            self._add_finding(
                event, FindingSubject.TERM, f"term {event.term} follows term {last.term} without coordinator_restarted"
            )
        elif event.term < last.term:
            self._add_finding(event, FindingSubject.TERM, f"term {event.term} follows term {last.term}")

    def _check_generation(self, event: ReadEvent) -> None:
        """Add a finding if an event is not of the current generation. Other events than steps may be of generation 0,
        too.

        `nodes_joined` may announce the next generation, which must then start with the next event. After a repair, in
        which the generation is unknown, any generation that is not older is accepted.
        """
        known, here, ahead = self._generation, event.generation, self._ahead
        self._ahead = 0
        if ahead and here != ahead:
            self._add_finding(event, FindingSubject.GENERATION, f"generation {ahead} was told of, and has not begun")
        if isinstance(event, GenerationStarted | JournalRepaired):
            return
        steps = isinstance(event, StepCommitted)
        if known is None:
            wrong = here and here < self._highest
        elif here > self._highest and isinstance(event, NodesJoined):
            self._ahead, wrong = here, False  # The nodes that join with a generation are reported right before it.
        else:
            wrong = here not in (0, known) or (here != known and steps)
        if wrong:
            where = f"generation {known} is in force" if known is not None else f"generation {self._highest} was before"
            self._add_finding(event, FindingSubject.GENERATION, f"it is of generation {here}, where {where}")

    def _check_generation_start(self, event: GenerationStarted) -> None:
        """Add a finding if generations do not rise, a node has no worker, or seed, micro-batches or batch size change.

        The generation of the event becomes the current one.
        """
        if event.generation < self._highest or (event.generation == self._highest and self._generation is not None):
            what = f"generation {event.generation} begins after generation {self._highest}"
            self._add_finding(event, FindingSubject.GENERATION, what)
        if not 0 < len(event.members) <= event.world_size:
            what = f"{len(event.members)} nodes cannot have {event.world_size} workers"
            self._add_finding(event, FindingSubject.GENERATION, what)
        self._generation, self._highest = event.generation, max(self._highest, event.generation)
        if event.seed is None or not event.micro_batches:
            return
        told = (event.seed, event.micro_batches)
        if self._seed is not None and told != (self._seed, self._micro_batches):
            what = f"seed and micro-batches are {told}, and were {(self._seed, self._micro_batches)}"
            self._add_finding(event, FindingSubject.SAMPLES, what)
        self._seed, self._micro_batches = told
        if event.global_batch is None:
            return
        if self._global_batch not in (None, event.global_batch):
            what = f"each step has {event.global_batch} samples by it, and had {self._global_batch}"
            self._add_finding(event, FindingSubject.SAMPLES, what)
        self._global_batch = event.global_batch

    def _check_step(self, event: StepCommitted) -> None:
        """Add a finding if a step does not follow the previous one in number and time, or its number of samples is
        wrong.

        If the sum of its sample hashes is correct, mark the step as proven; a wrong sum is a finding. A sum that is
        missing or cannot be checked is not a finding.
        """
        position = self._lineage.position
        if event.step != position.step + 1:
            self._add_finding(event, FindingSubject.STEP, f"step {event.step} follows step {position.step}")
        if event.time < position.step_time or event.step_s < 0:
            self._add_finding(event, FindingSubject.TIME, f"step {event.step} was committed before the one before it")
        if position.step_samples and event.samples != position.step_samples:
            what = f"step {event.step} has {event.samples} samples, those before have {position.step_samples}"
            self._add_finding(event, FindingSubject.SAMPLES, what)
        elif self._global_batch not in (None, event.samples):
            what = f"step {event.step} has {event.samples} samples: its generation is to make {self._global_batch}"
            self._add_finding(event, FindingSubject.SAMPLES, what)
        if event.skipped_samples > event.samples:
            what = f"step {event.step} has skipped {event.skipped_samples} of its {event.samples} samples"
            self._add_finding(event, FindingSubject.SAMPLES, what)
        if event.skipped_samples:
            self._skipped[event.step] = event.skipped_samples
        if event.sample_hashes is None:
            return
        wrong = self._find_sample_error(event.step, event.samples, event.sample_hashes)
        if wrong:
            self._add_finding(event, FindingSubject.SAMPLES, wrong)
        elif wrong is not None:
            self._lineage.mark_next_step_proven()

    def _find_sample_error(self, step: int, samples: int, hashes: int) -> str | None:
        """Return the error in a step's number of samples or sum of sample hashes, or "" if they are correct.

        None if seed or micro-batches are unknown, so that nothing can be checked. The first step that is checked sets
        the size of micro-batches.
        """
        seed, micro_batches = self._seed, self._micro_batches
        if seed is None or not micro_batches:
            return None
        if samples < micro_batches:
            return f"step {step} has {samples} samples: in {micro_batches} micro-batches there are at least as many"
        known = self._samples
        if known is None or (known.seed, known.micro_batches) != (seed, micro_batches):
            micro_batch = samples // micro_batches
            known = StepSamples(seed=seed, micro_batches=micro_batches, micro_batch=micro_batch)
            self._samples = known
        return known.find_error(step, samples=samples, hashes=hashes)

    def _check_skip(self, event: MicroBatchSkipped) -> None:
        """Record a skipped micro-batch.

        It is a finding if it was skipped twice, or if no step of that number was committed with skipped samples.
        """
        before = (event.step, event.micro_batch) in {skip[:2] for skip in self._skips[-1024:]}
        if before or event.step not in self._skipped:
            how = "twice" if before else "in no step"
            what = f"micro-batch {event.micro_batch} of step {event.step} was skipped {how}"
            self._add_finding(event, FindingSubject.SAMPLES, what)
        else:
            self._skips.append((event.step, event.micro_batch, event.reason))

    def _check_roll_back(self, event: RolledBack) -> None:
        """Add a finding if a roll-back goes forward, or if no checkpoint or snapshot of its step can exist."""
        step = self._lineage.position.step
        if event.to_step > step and self._lineage.begun:
            self._add_finding(
                event, FindingSubject.ROLL_BACK, f"it rolls back to step {event.to_step}, from step {step}"
            )
        elif not self._lineage.may_go_back_to(event.to_step):
            what = f"it rolls back to step {event.to_step}, of which no checkpoint or snapshot was saved"
            self._add_finding(event, FindingSubject.ROLL_BACK, what)

    def _check_repair(self, event: JournalRepaired) -> None:
        """Add a finding if `journal_repaired` contradicts the events before it: numbers, step, samples per step, or
        totals.

        Its lost events are counted, and the generation is unknown afterwards.
        """
        position = self._lineage.position
        self._lost += event.to_seq - event.from_seq + 1
        self._generation = None
        if event.to_seq != event.seq or event.from_seq > event.to_seq:
            what = f"events {event.from_seq} to {event.to_seq} are not what event {event.seq} can stand for"
            self._add_finding(event, FindingSubject.SEQUENCE, what)
        if event.from_step != position.step:
            what = f"the events before it end at step {position.step}, not {event.from_step}"
            self._add_finding(event, FindingSubject.STEP, what)
        if self._lineage.begun and event.to_step - event.from_step > event.to_seq - event.from_seq + 1:
            what = f"{event.to_step - event.from_step} steps do not fit {event.to_seq - event.from_seq + 1} lost events"
            self._add_finding(event, FindingSubject.STEP, what)
        if position.step_samples and event.step_samples != position.step_samples:
            what = f"steps have {event.step_samples} samples in it, and {position.step_samples} before"
            self._add_finding(event, FindingSubject.SAMPLES, what)
        from_the_start = position.samples == position.step * position.step_samples and self._lineage.begun
        expected = event.to_step * event.step_samples
        if event.samples > expected or (from_the_start and event.samples != expected):
            what = f"{event.to_step} steps of {event.step_samples} samples are not {event.samples} samples"
            self._add_finding(event, FindingSubject.TOTALS, what)

    def _check_end(self, event: JobFinished | JobFailed) -> None:
        """Record the outcome of the job. Add a finding if it finished with totals that differ from those of the events.

        The totals are the number of steps and of samples.
        """
        self._outcome = event.outcome if isinstance(event, JobFinished) else "failed"
        position = self._lineage.position
        if isinstance(event, JobFinished) and (event.steps, event.samples) != (position.step, position.samples):
            what = f"it says {event.steps} steps and {event.samples} samples"
            self._add_finding(
                event, FindingSubject.TOTALS, f"{what}; the events say {position.step} and {position.samples}"
            )


def audit_events(events: Iterable[ReadEvent]) -> AuditResult:
    """Audit events. Each counts as one line."""
    audit = Audit()
    for event in events:
        audit.check_event(event)
    return audit.result()


def audit_lines(lines: Iterable[bytes]) -> AuditResult:
    """Audit the lines of a journal file. A line that is not an event, or is incomplete, is a finding."""
    audit = Audit()
    for line in lines:
        audit.check_line(line)
    return audit.result()
