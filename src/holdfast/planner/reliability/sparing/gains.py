"""Training speed of a strategy's GPUs: sparing paper, Eq. 8-10."""

from __future__ import annotations

import numpy as np

from holdfast.planning.special import FloatArray, Floats, IntArray, as_floats


def hardware_gain(*, power_limit_ratio: Floats, exposed_communication: Floats) -> FloatArray:
    """Return the gain from the power that idle spare trays leave to the working GPUs of their rack, Eq. 8.

    Args:
        power_limit_ratio: power limit per GPU with the spare trays idle, over that with all trays at work.
        exposed_communication: share of time (0..1) that communication is exposed, which more power does not shorten.
    """
    return 1.0 + (1.0 - as_floats(exposed_communication)) * (np.sqrt(as_floats(power_limit_ratio)) - 1.0)


def power_limit_ratio(*, idle_per_working: Floats, idle_frees: Floats) -> FloatArray:
    """Return the power limit per GPU with some GPUs of a rack idle, over that with all at work.

    The rack's power stays the same. The working GPUs share the power that idle GPUs do not draw (section 3.6).

    Args:
        idle_per_working: idle GPUs of a rack for each working one.
        idle_frees: share of a working GPU's power limit that an idle one does not draw.
    """
    return 1.0 + as_floats(idle_frees) * as_floats(idle_per_working)


def tensor_parallel_speedup(tensor_parallel: int | IntArray, alpha: Floats) -> FloatArray:
    """Return G, Amdahl's speed-up with a ring collective's overhead, Eq. 9.

    `alpha` is the limit of the exposed share of communication for large parallelism.
    """
    tp, a = as_floats(tensor_parallel), as_floats(alpha)
    return tp / (1.0 + a * (tp - 1.0))


def model_gain(*, tensor_parallel: int | IntArray, baseline: int | IntArray, alpha: Floats) -> FloatArray:
    """Return the model's speed relative to the baseline's tensor parallelism, Eq. 10."""
    return tensor_parallel_speedup(tensor_parallel, alpha) / tensor_parallel_speedup(baseline, alpha)
