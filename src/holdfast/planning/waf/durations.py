"""How long until the next failure (Eq. 3's D_running), and how often nodes fail, by what was seen and known before.

Rates are per node and second; times are seconds.
"""

from __future__ import annotations

from math import inf

from holdfast.errors import BadInputError


def observed_rate(failures: float, node_s: float, *, known_rate: float, known_s: float) -> float:
    """Return how often a node fails: the mean of what is known before and of what was seen.

    That of a gamma distribution with `known_rate * known_s` failures in `known_s` seconds of one node, after `failures`
    more in `node_s` (the conjugate prior of a Poisson process): one failure moves it little, hundreds decide it.

    Raises:
        BadInputError: a number is negative, or there is nothing to go by.
    """
    for name, value in (("failures", failures), ("node_s", node_s), ("known_rate", known_rate), ("known_s", known_s)):
        if not 0 <= value < inf:
            raise BadInputError(f"{name} is {value:g}: give a number from 0 on")
    if known_s + node_s == 0:
        raise BadInputError("no node was seen for any time, and nothing is known before: a failure rate needs either")
    return (known_rate * known_s + failures) / (known_s + node_s)


def running_s(nodes: int, failure_rate: float, longest_s: float) -> float:
    """Return D_running(n'): how long so many nodes run until the first of them fails.

    Nodes that come back, and lead to a plan as well, are not counted: as often as others fail, they would make it half
    as long, which changes no plan worth telling (docs/fleet.md).

    Args:
        failure_rate: of a node. longest_s: no plan counts on more, as jobs come and go as well.
    """
    often = nodes * failure_rate
    return min(longest_s, 1.0 / often) if often > 0 else longest_s
