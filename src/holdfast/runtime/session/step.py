"""One attempt at one step, as the user's loop sees it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Protocol, cast

import torch

from holdfast.errors import BadInputError, StepUseError
from holdfast.protocol.commit import Commit


class StepWork(Protocol):
    """The work of a step: an `Attempt`, or a `ShadowAttempt`."""

    step: int
    update: str
    complete: bool

    @property
    def undone(self) -> bool: ...

    def micro_batches(self) -> Iterator[int]: ...

    def load(self, micro_batch: int) -> Any: ...

    def backward(self, loss: torch.Tensor, micro_batch: int) -> None: ...

    def skip(self, reason: str, micro_batch: int) -> None: ...

    def skip_reason(self, micro_batch: int) -> str: ...

    def log(self, values: Mapping[str, float | torch.Tensor], reduce: str) -> None: ...

    def check_extra(self) -> None: ...


class Step:
    """One attempt at one step of the job.

    A failure on another worker raises nothing here: the micro-batches end early, `apply` returns False, and `job.steps`
    yields the step again. After an `apply` that returned True, `loss` and `grad_norm` are of the global batch,
    `skipped` is True if the step did not change the model, and `metrics` has the logged values.

    A standby warms up with steps that have `shadow` set: each is undone, as by a failure.
    """

    def __init__(self, attempt: StepWork, conclude: Callable[[], Commit | None], *, shadow: bool = False) -> None:
        """Begin before the first micro-batch.

        Args:
            conclude: commits the attempt, or waits for the decision about it. Returns the step result if the step is
                applied on this worker by then, else None.
            shadow: whether the step does not count, and is never applied.
        """
        self.number = attempt.step
        #: the optimizer that this step updates, if there are several; else ""
        self.update = attempt.update
        self.loss = math.nan
        self.grad_norm = math.nan
        self.skipped = False
        self.metrics: Mapping[str, float] = {}
        self.applied = False
        self.shadow = shadow
        self._attempt = attempt
        self._conclude = conclude
        self._open: int | None = None
        self._started = False
        #: whether the script is inside the body of the loop over micro-batches
        self._looping = False
        self._ended = False

    def micro_batches(self) -> Iterator[Any]:
        """Yield this worker's micro-batches of the step, each seeded by (seed, step, micro-batch).

        Micro-batches that were skipped in an earlier attempt are skipped again without being yielded. Ends early if a
        failure undid the attempt.

        Raises:
            StepUseError: the loop continued without `backward` or `skip`, or is the second loop.
        """
        if self._started:
            raise StepUseError(f"step {self.number}: micro_batches() can be iterated once: each sample counts once")
        self._started = True
        for micro_batch in self._attempt.micro_batches():
            batch = self._attempt.load(micro_batch)
            if reason := self._attempt.skip_reason(micro_batch):
                self._attempt.skip(reason, micro_batch)  # As when the step was done before.
                continue
            self._open, self._looping = micro_batch, True
            yield batch
            if self._has_open_micro_batch:
                raise StepUseError(
                    f"step {self.number}: a micro-batch had no step.backward(loss): each needs exactly one; to leave "
                    "a micro-batch out on purpose, call step.skip(reason) instead"
                )
            self._looping = False

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward on the loss of the current micro-batch, and add its gradients to the sums of the step.

        Args:
            loss: mean over the samples of the micro-batch.

        Raises:
            StepUseError: called outside of the loop over micro-batches, or twice for one micro-batch; or the script
                made or changed gradients itself.
            BadInputError: the loss is not one number in a tensor, or the forward pass changed a buffer.
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
        """Skip the current micro-batch instead of calling `backward`, for example because its samples are bad.

        The gradient and the loss of the step are means over the other micro-batches. If all are skipped, the step is
        skipped. The decision belongs to the step: there is an event (`micro_batch_skipped`), and if the step is
        repeated, so is the decision.

        Args:
            reason: for people; at most 200 characters are kept.

        Raises:
            BadInputError: the reason is empty, the job has a layout, or the forward pass changed a buffer.
            StepUseError: called outside of the loop over micro-batches, after `backward`, or in the middle of the
                forward pass of a model with experts.
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
        """Log values of the step. Once it is applied, they are in `metrics` and in the event `step_committed`.

        Within the loop over micro-batches, a value belongs to the micro-batch. It is reduced over all micro-batches
        that log it, in their order, so the result does not depend on the number of workers. Outside of the loop, it
        belongs to the worker, and is reduced over all workers that log it. NaN and infinity are kept (null in events).

        Args:
            values: numbers, or tensors of one element, by name (1 to 128 characters); at most 16 KiB per step with
                their names.
            reduce: mean, sum, min or max; always the same for one name.

        Raises:
            BadInputError: a name is not a string, a value is not a number, or there are too many.
            StepUseError: called after `apply`.
        """
        if self._ended:
            raise StepUseError(f"step {self.number}: log() belongs before apply(), which adds the values to the step")
        self._attempt.log(values, reduce)

    def apply(self) -> bool:
        """Reduce the gradients, commit the step, and update the model: on all surviving workers, or on none.

        After a step that was not skipped, the `grad` of each parameter outside of experts is the clipped gradient of
        the global batch, until the next step begins.

        Returns:
            True if the step is applied, which happens exactly once per step; False if a failure undid the attempt.

        Raises:
            StepUseError: called twice, or before all micro-batches were computed; or the script made or changed
                gradients itself.
            BadInputError: an `extra` was changed outside of `apply()`, or logged values contradict each other.
            Exception: an exception of `after_apply`; the step is applied, and the job ends. Or of the optimizer: the
                state is void, and the process must end.
        """
        if self._ended or self._has_open_micro_batch:
            raise StepUseError(f"step {self.number}: apply() is called once, after all micro-batches had backward()")
        self._ended = True
        self._attempt.check_extra()
        if not self._attempt.complete and not self._attempt.undone:
            raise StepUseError(
                f"step {self.number}: apply() before the micro-batches were used up; do not break the loop"
            )
        v = self._conclude()
        if v is None:
            return False
        self.on_applied(v)
        return True

    @property
    def _has_open_micro_batch(self) -> bool:
        """Whether the current micro-batch still needs its `backward`."""
        return self._open is not None

    def check_applied(self) -> None:
        """Check that the step was applied before the loop continues.

        Raises:
            StepUseError: `apply` was not called, so the loop would get the same step forever.
        """
        if not self._ended:
            raise StepUseError(f"step {self.number}: the loop continued without step.apply()")

    def on_applied(self, commit: Commit) -> None:
        """Set `applied`, `loss`, `grad_norm`, `skipped` and `metrics` from the step result."""
        self.applied = True
        self.loss = commit.mean_loss
        self.grad_norm = math.sqrt(commit.grad_square)
        self.skipped = commit.skipped
        self.metrics = dict(commit.metrics)
