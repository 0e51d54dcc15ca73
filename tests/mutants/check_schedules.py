"""Run fixed schedules of all families on the `holdfast` on the path; exit 1 with the first failed one, or 0."""

from __future__ import annotations

import sys
from itertools import chain, zip_longest

from tests.simulation.cluster import SimCluster
from tests.simulation.schedules.enumeration import FAMILIES, plan_of
from tests.simulation.schedules.shrinking import failure

#: each family's number of schedules in a round, and the stride of its numbers
SHARES = {
    "random": (3, 1),
    "wide": (2, 1),
    "lively": (1, 1),
    "baseline": (1, 1),
    "enumerated": (1, 397),
    "witnesses": (1, 1),
    "corrupt": (1, 1),
    "raising": (1, 1),
    "ladder": (1, 1),
    "storm": (1, 1),
    "beginning": (1, 1),
    "ready": (1, 1),
    "memory": (1, 1),
    "moves": (1, 1),
    "layouts": (1, 1),
    "outdated": (1, 1),
    "combined": (1, 1),
}


def numbers(rounds: range) -> list[int]:
    """Return the schedules' numbers of these rounds, all families in turn."""
    columns = []
    for family, (share, stride) in SHARES.items():
        start = FAMILIES[family].start
        columns += [[start + stride * (share * turn + place) for turn in rounds] for place in range(share)]
    return [number for number in chain.from_iterable(zip_longest(*columns)) if number is not None]


def main(rounds: range) -> int:
    for number in numbers(rounds):
        how = failure(SimCluster(plan_of(number)))
        if how:
            print(f"schedule {number}: {how}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(range(int(sys.argv[1]), int(sys.argv[2]))))
