"""The time until the next failure (Eq. 3's D_running), and the failure rate of nodes from observations and a prior.

Rates are per node and second; times are seconds.
"""

from __future__ import annotations

from math import inf

from holdfast.errors import BadInputError


def observed_rate(failures: float, node_s: float, *, known_rate: float, known_s: float) -> float:
    """Return the failure rate of a node: the mean of the prior and the observations.

    It is the mean of a gamma distribution, the conjugate prior of a Poisson process. The prior has
    `known_rate * known_s` failures in `known_s` seconds of one node. The observations are `failures` in `node_s`
    seconds. One failure changes the rate little; hundreds decide it.

    Raises:
        BadInputError: A number is negative, or both times are 0.
    """
    for name, value in (("failures", failures), ("node_s", node_s), ("known_rate", known_rate), ("known_s", known_s)):
        if not 0 <= value < inf:
            raise BadInputError(f"{name} is {value:g}: give a number from 0 on")
    if known_s + node_s == 0:
        raise BadInputError("node_s and known_s are both 0: a failure rate needs observations or a prior")
    return (known_rate * known_s + failures) / (known_s + node_s)


def running_s(nodes: int, failure_rate: float, longest_s: float) -> float:
    """Return D_running(n'): the mean time in seconds until the first of `nodes` fails.

    Nodes that come back also lead to a plan, but are not counted. They return as often as others fail, so the time
    would be half as long, which does not change plans noticeably (docs/fleet.md).

    Args:
        nodes: The nodes that run.
        failure_rate: Failures per node and second.
        longest_s: The upper limit of the result, since jobs start and end as well.
    """
    often = nodes * failure_rate
    return min(longest_s, 1.0 / often) if often > 0 else longest_s
