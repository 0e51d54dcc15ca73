"""Tests of decisions against an enumerated statement of the rules (DESIGN.md 3.1)."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from machinery import commit, w

from holdfast.coordination.generations.decisions import NothingLeft, Verdict, decide
from holdfast.protocol.commit import Flag
from holdfast.protocol.messages.worker import Report
from holdfast.protocol.plan import Decision, DecisionKind, PassedStep, Phase
from holdfast.protocol.record import KnownCheckpoint
from holdfast.protocol.state import CheckpointSource, Holding

STEP = 5


def report(index: int, stand: str) -> Report:
    """Return the report of a worker after step 5 began; its phase determines the states it holds."""
    applied = {"void": None, "applied": STEP}.get(stand, STEP - 1)
    passed, ready = stand in ("passed", "applied"), stand in ("ready", "voted", "passed")
    return Report(
        worker=w(f"n{index}"),
        term=1,
        generation=1,
        applied=applied,
        step=STEP,
        phase=Phase.COMPUTE,
        result=Holding() if ready else None,
        reduced=commit(3.0) if ready else None,
        passed=PassedStep(step=STEP, commit=commit(3.0, Flag.SWAP)) if passed else None,
    )


# PASSED or APPLIED at one worker proves that every worker with state is at least READY.
DURING = st.lists(st.sampled_from(["void", "computing", "ready", "voted"]), max_size=6)
AFTER = st.lists(st.sampled_from(["void", "ready", "voted", "passed", "applied"]), max_size=6)
CHECKPOINTS = st.lists(st.integers(1, 4), unique=True, max_size=3).map(
    lambda steps: [KnownCheckpoint(step=step, name=f"c{step}") for step in sorted(steps)]
)
PREVIOUS = st.sampled_from([None, Decision(kind=DecisionKind.REDO, applied=STEP - 1)])
FORWARD = Decision(kind=DecisionKind.FORWARD, applied=STEP, commit=commit(3.0))


@given(stands=DURING | AFTER, checkpoints=CHECKPOINTS, previous=PREVIOUS, inherited=st.booleans())
def test_decisions_follow_the_enumerated_rules(
    stands: list[str], checkpoints: list[KnownCheckpoint], previous: Decision | None, inherited: bool
) -> None:
    if inherited:
        previous = FORWARD
    reports = [report(index, stand) for index, stand in enumerate(stands)]
    verdict = decide(previous, STEP - 1, reports, checkpoints)
    live = [index for index, stand in enumerate(stands) if stand != "void"]
    if not live:
        if not checkpoints:
            assert isinstance(verdict, NothingLeft)
            return
        assert isinstance(verdict, Verdict)
        newest = max(known.step for known in checkpoints)
        source = CheckpointSource(name=f"c{newest}")
        assert verdict.decision == Decision(kind=DecisionKind.ROLLBACK, applied=newest, source=source)
        return
    assert isinstance(verdict, Verdict)
    able = [index for index in live if stands[index] != "computing"]
    assert verdict.holders == tuple(w(f"n{index}") for index in able or live)
    if all(stands[index] == "applied" for index in live):
        assert verdict.decision == Decision(kind=DecisionKind.REDO, applied=STEP)
    elif any(stand in ("passed", "applied") for stand in stands):
        assert verdict.decision == msgspec.structs.replace(FORWARD, commit=commit(3.0, Flag.SWAP))
    elif able:
        assert verdict.decision == FORWARD, "flags count only after a worker has passed the vote"
    else:
        assert verdict.decision == Decision(kind=DecisionKind.REDO, applied=STEP - 1)


@pytest.mark.parametrize("known", [None, PassedStep(step=STEP - 1, commit=commit(9.0))])
def test_no_worker_goes_forward_without_the_result_of_that_step(known: PassedStep | None) -> None:
    """A worker claims to have applied it but gives no step result: the job continues from that worker's state."""
    liar = msgspec.structs.replace(report(0, "applied"), passed=known)
    verdict = decide(None, STEP - 1, [report(1, "computing"), liar], [])
    assert verdict == Verdict(decision=Decision(kind=DecisionKind.REDO, applied=STEP), holders=(liar.worker,))


@given(stands=DURING | AFTER, checkpoints=CHECKPOINTS, data=st.data())
def test_decisions_do_not_depend_on_the_order_of_reports(
    stands: list[str], checkpoints: list[KnownCheckpoint], data: st.DataObject
) -> None:
    reports = [report(index, stand) for index, stand in enumerate(stands)]
    shuffled = data.draw(st.permutations(reports))
    one, other = decide(None, STEP - 1, reports, checkpoints), decide(None, STEP - 1, shuffled, checkpoints)
    if isinstance(one, Verdict):
        assert isinstance(other, Verdict)
        assert (one.decision, set(one.holders)) == (other.decision, set(other.holders))
    else:
        assert one == other


def test_a_job_starts_only_from_a_complete_initial_state() -> None:
    torn, whole = (
        report(0, "void"),
        Report(worker=w("n1"), term=1, generation=1, applied=None, step=1, phase=Phase.IDLE, fresh=True),
    )
    verdict = decide(None, 0, [torn, whole], [])
    assert verdict == Verdict(decision=Decision(kind=DecisionKind.START, applied=0), holders=(w("n1"),))
    verdict = decide(None, 0, [torn], [], arrivals=[w("n2")])
    assert isinstance(verdict, Verdict)
    assert verdict.holders == (w("n2"),)
    verdict = decide(None, 0, [torn], [])
    assert isinstance(verdict, Verdict)
    assert verdict.holders == ()


def test_gradients_of_another_attempt_are_ignored() -> None:
    other = msgspec.structs.replace(report(1, "ready"), reduced=commit(4.0))
    verdict = decide(None, STEP - 1, [report(0, "applied"), other], [])
    assert isinstance(verdict, Verdict)
    assert verdict.holders == (w("n0"),)


@pytest.mark.parametrize("inherited", [False, True])
def test_a_committed_step_is_not_undone_except_by_a_rollback(inherited: bool) -> None:
    previous = FORWARD if inherited else None
    stands = [report(0, "computing"), report(1, "void")]
    verdict = decide(previous, STEP - 1, stands, [])
    assert verdict == Verdict(decision=Decision(kind=DecisionKind.REDO, applied=STEP - 1), holders=(w("n0"),))
    known = [KnownCheckpoint(step=2, name="c2")]
    verdict = decide(previous, STEP, stands, known)
    assert isinstance(verdict, Verdict)
    assert verdict.decision.kind is DecisionKind.ROLLBACK


@pytest.mark.parametrize("stand", ["applied", "passed"])
def test_a_worker_without_the_dense_state_does_not_determine_the_step(stand: str) -> None:
    """It keeps only the experts of the step, so it cannot provide the next state for others."""
    apart = Holding(dense=False)
    torn = msgspec.structs.replace(report(0, stand), state=apart, result=apart)
    verdict = decide(None, STEP - 1, [torn, report(1, "computing")], [])
    assert verdict == Verdict(decision=Decision(kind=DecisionKind.REDO, applied=STEP - 1), holders=(w("n1"),))


def lost_at(*steps: int) -> Callable[[Verdict], list[tuple[int, int]]]:
    """Return a function that reports expert 7 of layer 1 as lost at these steps."""
    return lambda verdict: [(1, 7)] if verdict.decision.applied in steps else []


def test_with_experts_a_step_goes_forward_only_if_all_are_ready() -> None:
    redo = Decision(kind=DecisionKind.REDO, applied=STEP - 1)
    some, every = [report(0, "ready"), report(1, "computing")], [report(0, "ready"), report(1, "voted")]
    verdict = decide(None, STEP - 1, some, [], lost=lost_at())
    assert verdict == Verdict(decision=redo, holders=(w("n0"), w("n1")))
    verdict = decide(None, STEP - 1, every, [], lost=lost_at())
    assert verdict == Verdict(decision=FORWARD, holders=(w("n0"), w("n1")))


def test_the_newest_step_without_a_lost_expert_is_decided() -> None:
    reports = [report(0, "applied"), report(1, "voted")]
    verdict = decide(None, STEP - 1, reports, [], lost=lost_at(STEP))
    assert verdict == Verdict(decision=Decision(kind=DecisionKind.REDO, applied=STEP - 1), holders=(w("n1"),))
    verdict = decide(None, STEP - 1, reports, [], lost=lost_at(STEP, STEP - 1))
    assert isinstance(verdict, NothingLeft)
    assert "expert 7 of MoE layer 1" in verdict.why
    verdict = decide(None, STEP, reports, [], lost=lost_at(STEP))
    assert isinstance(verdict, NothingLeft), "step 5 is announced"
