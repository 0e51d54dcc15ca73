"""Roles of workers within a model replica, and replica groups (docs/layouts.md).

The ranks of one role are its domain. With the default layout, each worker is a replica group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.protocol.layouts.layout import WHOLE, Layout
from holdfast.protocol.names import index_of, node_of
from holdfast.protocol.plan import Role

#: A node, and the number of a replica group on it.
UnitName = tuple[str, int]


def assign_roles(workers: Sequence[str], layout: Layout = WHOLE) -> dict[str, Role]:
    """Return each worker's role; the workers are in rank order."""
    return {worker: layout.role_of(index_of(worker)) for worker in workers}


def unit_of(worker: str, places: int) -> UnitName:
    """Return the replica group of a worker; each group has `places` workers."""
    return node_of(worker), index_of(worker) // places


def whole_units(workers: Iterable[str], places: int) -> list[tuple[str, ...]]:
    """Return the complete replica groups of `places` workers among these workers. Each lists its workers by local rank;
    the groups are in the order of their first workers.
    """
    if places == 1:
        return [(worker,) for worker in workers]
    units: dict[UnitName, list[str]] = {}
    for worker in workers:
        units.setdefault(unit_of(worker, places), []).append(worker)
    return [tuple(sorted(unit, key=index_of)) for unit in units.values() if len(unit) == places]


def only_whole(workers: Sequence[str], places: int) -> list[str]:
    """Return the workers that are in complete replica groups of `places` workers, in the same order."""
    if places == 1:
        return list(workers)
    whole = {worker for unit in whole_units(workers, places) for worker in unit}
    return [worker for worker in workers if worker in whole]


def by_role(workers: Iterable[str], places: int) -> list[list[str]]:
    """Return one list of workers for each local rank in a replica group of `places` workers, in the given order."""
    found: list[list[str]] = [[] for _ in range(places)]
    for worker in workers:
        found[index_of(worker) % places].append(worker)
    return found


def every_role(workers: Iterable[str], places: int) -> bool:
    """Return whether every role has a worker, so that the state is complete."""
    return all(by_role(workers, places))
