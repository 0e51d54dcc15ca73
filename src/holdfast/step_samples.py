"""What a step is made of, as a number: each of its micro-batches has a hash, and the sum of all is expected in v.

A hash joins a rank's sum where the gradient does, and stays with it as long as that is kept. So a gradient that is in
a step twice, one that lacks, and one of another micro-batch or of another step show in v: two wrong sums in 2**32 look
right.
"""

from __future__ import annotations

import struct
from hashlib import shake_128

#: Most micro-batches of a step. Sums are sent as float64, exact up to 2**53, and stay below that even with each hash
#: twice.
MAX_MICRO_BATCHES = 1 << 20


#: whole numbers up to here are exact in float64; half of it, so that a sum with each hash twice still is
_EXACT_BITS = 52


def place_hash(sample_hash: int, place: int, places: int, micro_batches: int) -> int:
    """Return the hash that a place of a unit adds for a micro-batch: another one at each place.

    So a micro-batch that is missing at one place and doubled at another does not add up. The hashes have as many bits
    as sums over all places and micro-batches have room for.
    """
    dropped = max(0, 32 + (micro_batches * places).bit_length() - _EXACT_BITS)
    return sample_hash * (2 * place + 1) % (1 << 32) >> dropped


class StepSamples:
    """The micro-batches of each step of a job, and their hashes: a function of seed, step and number only.

    A step of 64 micro-batches takes one or two microseconds. The hashes of the newest step are cached.
    """

    def __init__(self, *, seed: int, micro_batches: int, micro_batch: int) -> None:
        """Set the number and size of a job's micro-batches.

        Args:
            seed: of the order of samples; only its lowest 64 bits count.
            micro_batches: per step, at most `MAX_MICRO_BATCHES`.
            micro_batch: samples in each of them.
        """
        self.seed = seed % (1 << 64)
        self.micro_batches = micro_batches
        self.micro_batch = micro_batch
        self._newest: tuple[int, tuple[int, ...], int] = (0, (), 0)

    def hash_of(self, step: int, micro_batch: int) -> int:
        """Return the hash of one micro-batch of a step, 32 bits; steps count from 1, micro-batches from 0.

        Raises:
            ValueError: the step or the micro-batch does not exist.
        """
        if step < 1 or not 0 <= micro_batch < self.micro_batches:
            raise ValueError(f"there is no micro-batch {micro_batch} of step {step}")
        return self._of(step)[0][micro_batch]

    def expected(self, step: int) -> int:
        """Return the sum of the hashes of all micro-batches of a step."""
        return self._of(step)[1]

    def expected_at_places(self, step: int, places: int) -> int:
        """Return the sum of all place hashes of a step, over the places of a unit but the first."""
        hashes = self._of(step)[0] if places > 1 else ()
        return sum(place_hash(one, place, places, self.micro_batches) for one in hashes for place in range(1, places))

    def find_error(self, step: int, *, samples: int, hashes: int, place_hashes: int = 0, places: int = 1) -> str:
        """Return the error in the samples of a step, or "" if each micro-batch is in it once on each local rank.

        Args:
            step: the step, from 1.
            samples: the number of samples that were counted.
            hashes: the sum of micro-batch hashes over the first workers of all replica groups.
            place_hashes: the sum over the other workers.
            places: how many workers share one replica of the model.
        """
        global_batch, expected = self.micro_batches * self.micro_batch, self.expected(step)
        if (samples, hashes) == (global_batch, expected):
            elsewhere = self.expected_at_places(step, places)
            if place_hashes == elsewhere:
                return ""
            return (
                f"step {step} is not made of each of its {self.micro_batches} micro-batches once at each of the "
                f"{places} places of a replica: sum of place hashes {place_hashes:#x} instead of {elsewhere:#x}"
            )
        return (
            f"step {step} is not made of each of its {self.micro_batches} micro-batches once: {samples} samples of "
            f"{global_batch}, sum of hashes {hashes:#x} instead of {expected:#x}"
        )

    def _of(self, step: int) -> tuple[tuple[int, ...], int]:
        """Return the hashes of a step by micro-batch, 32 bits each, and their sum. Only the newest step is cached."""
        known, hashes, total = self._newest
        if known != step:
            # One stream per step, four bytes of it per micro-batch: no hash depends on how many there are.
            stream = shake_128(f"{self.seed}/{step}".encode()).digest(4 * self.micro_batches)
            hashes = struct.unpack(f"<{self.micro_batches}I", stream)
            total = sum(hashes)
            self._newest = step, hashes, total
        return hashes, total
