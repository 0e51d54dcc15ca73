"""Which samples form a micro-batch: a pure function of (seed, length, global batch, step, micro-batch).

All passes over the data set form one sequence, each pass in its own order. Step s takes the s-th global batch of it. So
members, failures and restarts do not change the samples of a step, and every pass has each sample exactly once.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import cast

import numpy as np

from holdfast.errors import BadInputError
from holdfast.step_samples import MAX_MICRO_BATCHES

#: A step spans at most two passes if the data set is larger than the global batch.
_KEPT_PASSES = 2


class StepSizes:
    """How many samples each step of a job has, and the size of its micro-batches."""

    #: samples in the data set; 0 if they cannot be counted
    length = 0

    def __init__(self, *, seed: int, global_batch: int, micro_batch: int) -> None:
        """Check and set the sizes.

        Args:
            seed: any integer; all randomness of samples follows from it.
            global_batch: samples per step.
            micro_batch: samples per micro-batch.

        Raises:
            BadInputError: a number is out of range, or the global batch is not a multiple of the micro-batch.
        """
        for name, number in (("seed", seed), ("global_batch", global_batch), ("micro_batch", micro_batch)):
            if not isinstance(cast(object, number), int):
                raise BadInputError(f"{name} is {number!r}: it must be a whole number")
        if micro_batch < 1 or global_batch < 1:
            raise BadInputError(
                f"global_batch is {global_batch} and micro_batch is {micro_batch}: both must be at least 1"
            )
        if global_batch % micro_batch:
            raise BadInputError(
                f"global_batch is {global_batch} and micro_batch is {micro_batch}: "
                "the global batch must be a multiple of the micro-batch"
            )
        if global_batch // micro_batch > MAX_MICRO_BATCHES:
            raise BadInputError(
                f"global_batch is {global_batch} and micro_batch is {micro_batch}: a step may have up to "
                f"{MAX_MICRO_BATCHES} micro-batches"
            )
        self.seed = seed
        self.global_batch = global_batch
        self.micro_batch = micro_batch

    @property
    def micro_batches(self) -> int:
        """M: micro-batches per step."""
        return self.global_batch // self.micro_batch

    def make_order(self, length: int) -> SampleOrder:
        """Return the order of this many samples, in steps of these sizes.

        Raises:
            BadInputError: there are no samples.
        """
        return SampleOrder(seed=self.seed, length=length, global_batch=self.global_batch, micro_batch=self.micro_batch)

    def check_micro_batch(self, step: int, micro_batch: int) -> None:
        """Check that a micro-batch exists. Steps count from 1, micro-batches from 0.

        Raises:
            ValueError: it does not exist.
        """
        if step < 1 or not 0 <= micro_batch < self.micro_batches:
            raise ValueError(f"there is no micro-batch {micro_batch} of step {step}")


class SampleOrder(StepSizes):
    """The order in which a job uses the samples of a data set with indices."""

    def __init__(self, *, seed: int, length: int, global_batch: int, micro_batch: int) -> None:
        """Create the order.

        Args:
            length: samples in the data set.

        Raises:
            BadInputError: a number is out of range, or the global batch is not a multiple of the micro-batch.
        """
        super().__init__(seed=seed, global_batch=global_batch, micro_batch=micro_batch)
        if length < 1:
            raise BadInputError("the data set is empty: it needs at least one sample")
        self.length = length
        self._passes: OrderedDict[int, np.ndarray] = OrderedDict()

    def indices(self, step: int, micro_batch: int) -> list[int]:
        """Return the indices of a micro-batch's samples in the data set. Steps count from 1, micro-batches from 0.

        Raises:
            ValueError: the step or micro-batch does not exist.
        """
        self.check_micro_batch(step, micro_batch)
        start = (step - 1) * self.global_batch + micro_batch * self.micro_batch
        return [self.sample_at(place) for place in range(start, start + self.micro_batch)]

    def sample_at(self, place: int) -> int:
        """Return the index of the sample at a 0-based position of the endless sequence of passes."""
        number, offset = divmod(place, self.length)
        return int(self._permutation_of(number)[offset])

    def _permutation_of(self, number: int) -> np.ndarray:
        """Return the order of samples in a pass: a permutation that follows from the seed and the pass's 0-based
        number. The last `_KEPT_PASSES` ones are kept.
        """
        order = self._passes.get(number)
        if order is None:
            # Philox is counter-based: the key alone determines the stream, independent of earlier draws.
            key = np.array([self.seed % (1 << 64), number], dtype=np.uint64)
            order = np.random.Generator(np.random.Philox(key=key)).permutation(self.length)
            self._passes[number] = order
            while len(self._passes) > _KEPT_PASSES:
                self._passes.popitem(last=False)
        return order
