"""One attempt at one step: what the user's loop is given."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Protocol, cast

import torch

from holdfast.errors import BadInputError, StepUseError
from holdfast.protocol.commit import Commit


class StepWork(Protocol):
    """What a step does: an `Attempt`, or a `ShadowAttempt`."""

    step: int
    update: str
    complete: bool

    @property
    def undone(self) -> bool: ...

    def micro_batches(self) -> Iterator[int]: ...

    def load(self, micro_batch: int) -> Any: ...

    def backward(self, loss: torch.Tensor, micro_batch: int) -> None: ...

    def skip(self, reason: str, micro_batch: int) -> None: ...

    def decision(self, micro_batch: int) -> str: ...

    def log(self, values: Mapping[str, float | torch.Tensor], reduce: str) -> None: ...

    def check_extra(self) -> None: ...


class Step:
    """One attempt at one step of the job.

    A failure elsewhere never raises here: the micro-batches simply end, `apply` returns False, and `job.steps` yields
    the step again. After an `apply` that returned True, `loss` and `grad_norm` are those of the global batch, `skipped`
    says whether its gradients were not finite and left the model as it was, and `metrics` has what was logged.

    A node that waits as a standby warms up by steps that are a `shadow`: each is undone, as by a failure.
    """

    def __init__(self, attempt: StepWork, settle: Callable[[], Commit | None], *, shadow: bool = False) -> None:
        """Stand before its first micro-batch.

        Args:
            settle: commits the attempt, or waits until what becomes of the step is decided elsewhere; returns v where
                it is applied here by then.
            shadow: nobody counts this one, and it is never applied.
        """
        self.number = attempt.step
        #: the name of the optimizer that this step updates, of several; "" of one
        self.update = attempt.update
        self.loss = math.nan
        self.grad_norm = math.nan
        self.skipped = False
        self.metrics: Mapping[str, float] = {}
        self.applied = False
        self.shadow = shadow
        self._attempt = attempt
        self._settle = settle
        self._open: int | None = None
        self._begun = False
        #: whether the script is inside the body of that loop
        self._looping = False
        self._ended = False

    def micro_batches(self) -> Iterator[Any]:
        """Yield this worker's micro-batches of the step, each seeded by (seed, step, micro-batch).

        Raises:
            StepUseError: the loop went on without `backward`, or is the second one.
        """
        if self._begun:
            raise StepUseError(f"step {self.number}: micro_batches() is gone through once, its samples count once")
        self._begun = True
        for micro_batch in self._attempt.micro_batches():
            batch = self._attempt.load(micro_batch)
            if reason := self._attempt.decision(micro_batch):
                self._attempt.skip(reason, micro_batch)  # As when the step was done before.
                continue
            self._open, self._looping = micro_batch, True
            yield batch
            if self._at_hand:
                raise StepUseError(
                    f"step {self.number}: a micro-batch had no step.backward(loss): each needs exactly one; to leave "
                    "a micro-batch out on purpose, call step.skip(reason) instead"
                )
            self._looping = False

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of the micro-batch at hand; `loss` is its mean.

        Raises:
            StepUseError: there is no micro-batch at hand.
        """
        if self._open is None and self._looping:
            raise StepUseError(
                f"step {self.number}: a second step.backward() for one micro-batch: add its losses and call "
                "step.backward(loss) once, with their sum"
            )
        if self._open is None:
            raise StepUseError(f"step {self.number}: backward() belongs inside `for batch in step.micro_batches()`")
        micro_batch, self._open = self._open, None
        self._attempt.backward(loss, micro_batch)

    def skip(self, reason: str) -> None:
        """Leave the micro-batch at hand out of the step, in place of `backward`: its samples are bad, or its loss is.

        The step's gradient and loss are the means over the other micro-batches. If all are skipped, so is the step. The
        decision is part of the step: it is told (`micro_batch_skipped`), and repeated if the step is done again.

        Args:
            reason: for people, in its first 200 characters.

        Raises:
            BadInputError: there is no reason, or the job has a layout.
            StepUseError: there is no micro-batch at hand, or it has had its backward.
        """
        given = cast(object, reason)
        if not isinstance(given, str) or not given.strip():
            raise BadInputError(f"step.skip({reason!r}): give the reason in words, such as step.skip('loss is NaN')")
        if self._open is None:
            raise StepUseError(
                f"step {self.number}: skip() belongs inside `for batch in step.micro_batches()`, in place of backward()"
            )
        micro_batch, self._open = self._open, None
        self._attempt.skip(given.strip(), micro_batch)

    def log(
        self,
        values: Mapping[str, float | torch.Tensor],
        *,
        reduce: Literal["mean", "sum", "min", "max"] = "mean",
    ) -> None:
        """Log values of the step: once it is applied, `metrics` has them, and the job's events (`step_committed`).

        Inside the loop over the micro-batches a value is the micro-batch's, whoever computes that: it is reduced over
        all those of the step that log it, in their order, so that it does not depend on the world. Outside of the loop
        it is this worker's, and is reduced over the workers that log it; what is the same on all stays what it is. What
        is infinite or no number is kept as it is (null in the events). Steps that log nothing cost nothing.

        Args:
            values: numbers by name (1 to 128 characters), or tensors of one element; 16 KiB a step with their names.
            reduce: mean, sum, min or max; of one name always the same.

        Raises:
            BadInputError: a name is no string, a value no number, or it is too much.
            StepUseError: after `apply`.
        """
        if self._ended:
            raise StepUseError(
                f"step {self.number}: log() belongs before apply(), which makes the values those of the step"
            )
        self._attempt.log(values, reduce)

    def apply(self) -> bool:
        """Reduce, agree, and change the state: on all survivors or on none.

        After a step that was not skipped, the `grad` of each parameter outside the experts is the global batch's,
        clipped, until the next step begins.

        Returns:
            True where the step is applied here, exactly once per step; False where a failure undid the attempt.

        Raises:
            StepUseError: called twice, or before all micro-batches were computed.
            BadInputError: an `extra` was changed since the step before, outside of its apply().
            Exception: whatever `after_apply` raised; the step is applied, and the job ends.
        """
        if self._ended or self._at_hand:
            raise StepUseError(f"step {self.number}: apply() is called once, after all micro-batches had backward()")
        self._ended = True
        self._attempt.check_extra()
        if not self._attempt.complete and not self._attempt.undone:
            raise StepUseError(
                f"step {self.number}: apply() before the micro-batches were used up; do not break the loop"
            )
        v = self._settle()
        if v is None:
            return False
        self.passed(v)
        return True

    @property
    def _at_hand(self) -> bool:
        """True while a micro-batch waits for its `backward`."""
        return self._open is not None

    def left(self) -> None:
        """The loop wants another step.

        Raises:
            StepUseError: without having called `apply`: it would be given the same step for ever.
        """
        if not self._ended:
            raise StepUseError(f"step {self.number}: the loop goes on without step.apply()")

    def passed(self, commit: Commit) -> None:
        """The step is applied: take its loss, its norm and whether it was skipped from v."""
        self.applied = True
        self.loss = commit.mean_loss
        self.grad_norm = math.sqrt(commit.grad_square)
        self.skipped = commit.skipped
        self.metrics = dict(commit.metrics)
