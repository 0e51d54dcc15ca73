"""One worker's copy of the job's state: the step to which it belongs, and how a decision changes it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import Enum, auto

from holdfast.protocol.commit import Commit, Wish, have_same_lanes, step_weight
from holdfast.protocol.plan import MAX_PASSED, Decision, DecisionKind, PassedStep


class Stateless(Enum):
    """Kinds of local state that do not belong to any step of the job."""

    #: the initial state of this process: nothing was applied, loaded or received, not even in part
    FRESH = auto()
    #: a state that was overwritten, at least in part
    VOID = auto()


class StateCopy:
    """The state in one worker's memory, and the newest step that this worker knows to have passed."""

    def __init__(self) -> None:
        """Start with the initial state of a process."""
        self.passed: PassedStep | None = None
        #: the result of the next step without its flags, if its reduced gradients are here
        self.reduced: Commit | None = None
        #: whether the local state stays until a newer one has arrived completely from a member
        self.keeps = False
        #: the steps that came with the state, until this node's agent knows them
        self.sent: tuple[PassedStep, ...] = ()
        #: the newest steps with known results up to the step of the state; `_weight` limits their number
        self.history: deque[PassedStep] = deque()
        self._weight = 0
        self._step_or_kind: int | Stateless = Stateless.FRESH

    @property
    def applied(self) -> int | None:
        """The step of the local state, or None for a fresh or void state."""
        return None if isinstance(self._step_or_kind, Stateless) else self._step_or_kind

    @property
    def step(self) -> int:
        """The number of the step in progress."""
        return 1 if self.applied is None else self.applied + 1

    @property
    def fresh(self) -> bool:
        """Whether the local state is the complete initial state, and no job has started from it."""
        return self._step_or_kind is Stateless.FRESH

    @property
    def lacking(self) -> bool:
        """Whether the state with which the generation begins has not arrived yet."""
        return self.applied is None or self.keeps

    @property
    def stops(self) -> bool:
        """Whether the step of the local state was the last: a script has requested a stop after it."""
        last = self.history[-1] if self.history else None
        return last is not None and last.step == self._step_or_kind and Wish.STOP in last.commit.wishes

    @property
    def skipped(self) -> bool:
        """Whether the newest step of the history was skipped, and not because of a loss scale."""
        last = self.history[-1] if self.history else None
        return last is not None and last.step == self._step_or_kind and last.commit.failed

    def set_step(self, step: int, passed: Iterable[PassedStep] = ()) -> None:
        """Record that the complete state of `step` is here; `passed` lists the unknown steps up to it.

        They extend the history; the oldest are dropped while the sum of the weights (`step_weight`) is above
        `MAX_PASSED`. Reduced gradients are forgotten.
        """
        for one in passed:
            self.history.append(one)
            self._weight += step_weight(one.commit)
        while self._weight > MAX_PASSED:
            self._weight -= step_weight(self.history.popleft().commit)
        self._step_or_kind = step
        self.passed = self.history[-1] if self.history else None
        self.reduced, self.keeps = None, False

    def set_loaded(self, step: int, decision: Decision | None) -> None:
        """Record that the state of `step` was loaded.

        If a script stopped the job there, the decision of the rollback contains the step's result.
        """
        v = decision.commit if decision is not None else None
        self.set_step(step, [] if v is None else [PassedStep(step=step, commit=v)])

    def mark_void(self) -> None:
        """Mark the state as void, because it is overwritten or will be.

        The history and reduced gradients are forgotten.
        """
        self._step_or_kind, self.passed = Stateless.VOID, None
        self.reduced, self.keeps = None, False
        self.history.clear()
        self._weight = 0

    def is_forward_due(self, decision: Decision | None) -> bool:
        """Return whether the decision is to apply the retained gradients of the step after the local state."""
        if decision is None or decision.kind is not DecisionKind.FORWARD or self.lacking:
            return False
        return self.applied == decision.applied - 1

    def apply_decision(self, decision: Decision, *, receives: bool, apart: bool) -> None:
        """Change the record of the local state as a decision requires.

        A rollback makes it void. If a member sends the state, the own one is void or kept until then. Else START makes
        a fresh state that of the job's first step, FORWARD records the next step as passed, and REDO forgets its
        reduced gradients.

        Args:
            receives: Whether the plan names a member that sends the state to this worker.
            apart: Whether part of the state (the experts) arrives separately and replaces local state before the rest
                arrives.

        Raises:
            ValueError: The decision does not match the local state.
        """
        if decision.kind is DecisionKind.ROLLBACK:
            # A checkpoint is loaded into the live parameters, so they are no longer the initial state.
            self.mark_void()
            return
        # After a START, the local state does not belong to any step of the job.
        is_start = decision.kind is DecisionKind.START
        self.keeps = receives and not (apart or is_start) and self.applied is not None
        if receives:
            self.reduced = None
            if not (self.fresh or self.keeps):
                self.mark_void()
            return
        if decision.kind is DecisionKind.START and self.applied is None:
            if not self.fresh:
                raise ValueError("START from a state that is partly overwritten")
            self._step_or_kind = decision.applied
        if self.applied is None:
            raise ValueError("there is no state, and the plan names no source for it")
        if self.is_forward_due(decision):
            if self.reduced is None or decision.commit is None:
                raise ValueError("FORWARD without reduced gradients")
            if not have_same_lanes(self.reduced, decision.commit):
                raise ValueError(f"FORWARD with {decision.commit}, but the local result is {self.reduced}")
            self.passed = PassedStep(step=decision.applied, commit=decision.commit)
            return
        if self.applied != decision.applied:
            raise ValueError(f"the local state is of step {self.applied}, the decision of step {decision.applied}")
        # Discard the results of the step that is repeated.
        self.reduced = None
        self.passed = self.history[-1] if self.history else None
