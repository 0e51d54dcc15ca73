"""One worker's copy of the job's state: of which step it is, and what a decision makes of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import Enum, auto

from holdfast.protocol.commit import Commit, Wish, have_same_lanes, step_weight
from holdfast.protocol.plan import MAX_PASSED, Decision, DecisionKind, Passed


class Stateless(Enum):
    """What is in memory where it is not the state of any step of the job."""

    FRESH = auto()  # the initial state of this process: nothing was applied, loaded or received, not even in part
    VOID = auto()


class StateCopy:
    """The state in one worker's memory, and the newest step that is known here to have passed."""

    def __init__(self) -> None:
        """Be the initial state of a process."""
        self.passed: Passed | None = None
        #: v of the next step, but for its flags, where its reduced gradients are here
        self.reduced: Commit | None = None
        #: a newer state is to come from a member; what is here stays until that has come whole
        self.keeps = False
        #: the steps that came with the state, until this node's agent knows them
        self.sent: tuple[Passed, ...] = ()
        #: the newest steps up to the state's, as far as v is known here; as how many they count
        self.history: deque[Passed] = deque()
        self._weight = 0
        self._of: int | Stateless = Stateless.FRESH

    @property
    def applied(self) -> int | None:
        """The step whose state is here; None: no state of the job (fresh or void)."""
        return None if isinstance(self._of, Stateless) else self._of

    @property
    def step(self) -> int:
        """The step in progress."""
        return 1 if self.applied is None else self.applied + 1

    @property
    def fresh(self) -> bool:
        """True where the initial state is here, whole, and nobody has made it the job's."""
        return self._of is Stateless.FRESH

    @property
    def lacking(self) -> bool:
        """True where the state that the generation begins with is still to come."""
        return self.applied is None or self.keeps

    @property
    def stops(self) -> bool:
        """True where the step whose state is here was the last: a script has asked all to stop after it."""
        last = self.history[-1] if self.history else None
        return last is not None and last.step == self._of and Wish.STOP in last.commit.wishes

    @property
    def skipped(self) -> bool:
        """Whether the newest step that led here was skipped, and no loss scale explains it."""
        last = self.history[-1] if self.history else None
        return last is not None and last.step == self._of and last.commit.failed

    def hold(self, step: int, passed: Iterable[Passed] = ()) -> None:
        """The whole state of `step` is here; `passed`: the steps that have led there, beside those known before."""
        for one in passed:
            self.history.append(one)
            self._weight += step_weight(one.commit)
        while self._weight > MAX_PASSED:
            self._weight -= step_weight(self.history.popleft().commit)
        self._of, self.passed = step, self.history[-1] if self.history else None
        self.reduced, self.keeps = None, False

    def load(self, step: int, decision: Decision | None) -> None:
        """The state of `step` is here from a checkpoint; a roll-back's decision has its v where a script stopped."""
        v = decision.commit if decision is not None else None
        self.hold(step, [] if v is None else [Passed(step=step, commit=v)])

    def spoil(self) -> None:
        """What is here is overwritten, or about to be."""
        self._of, self.passed = Stateless.VOID, None
        self.reduced, self.keeps = None, False
        self.history.clear()
        self._weight = 0

    def forward_due(self, decision: Decision | None) -> bool:
        """Return whether the decided step is the next one here, and was decided to be applied."""
        if decision is None or decision.kind is not DecisionKind.FORWARD or self.lacking:
            return False
        return self.applied == decision.applied - 1

    def settle(self, decision: Decision, *, receives: bool, apart: bool) -> None:
        """Take over what a decision says about the state.

        Args:
            receives: the plan names who sends the state to this worker.
            apart: some of the state comes another way, and takes the place of what is here before the rest does.

        Raises:
            ValueError: the decision does not fit what is here.
        """
        if decision.kind is DecisionKind.ROLLBACK:
            # A checkpoint is read into the live parameters: they are nobody's initial state any more.
            self.spoil()
            return
        anew = decision.kind is DecisionKind.START  # (then what is here is of no step of the job any more)
        self.keeps = receives and not (apart or anew) and self.applied is not None
        if receives:
            self.reduced = None
            if not (self.fresh or self.keeps):
                self.spoil()
            return
        if decision.kind is DecisionKind.START and self.applied is None:
            if not self.fresh:
                raise ValueError("START from a state that is half overwritten")
            self._of = decision.applied
        if self.applied is None:
            raise ValueError("no state, and no source for it")
        if self.forward_due(decision):
            if self.reduced is None or decision.commit is None:
                raise ValueError("FORWARD without reduced gradients")
            if not have_same_lanes(self.reduced, decision.commit):
                raise ValueError(f"FORWARD with {decision.commit}, here is {self.reduced}")
            self.passed = Passed(step=decision.applied, commit=decision.commit)
            return
        if self.applied != decision.applied:
            raise ValueError(f"state {self.applied} where {decision.applied} is decided")
        # (whatever has come of the step that is done again)
        self.reduced, self.passed = None, self.history[-1] if self.history else None
