"""Breadth-first search through all states for a broken invariant, or a state without a path to an end."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from explored_moves import moves
from explored_state import Rules, initial

HOLDS, OPEN, UNSAFE, STUCK = "holds", "open", "UNSAFE", "STUCK"


@dataclass(frozen=True)
class Found:
    """The result for a variant.

    `verdict` is HOLDS (all states were explored), OPEN (no error was found before the limit), UNSAFE or STUCK. `way` is
    then the shortest path to the error.
    """

    name: str
    verdict: str
    states: int
    seconds: float
    why: str = ""
    way: tuple[str, ...] = ()
    state: Any = None

    def __str__(self) -> str:
        return f"{self.name:58} {self.verdict:6} {self.states:>10,} states {self.seconds:6.0f} s  {self.why}".rstrip()


class _Seen:
    """The hashes of the found states, numbered in the order of discovery."""

    def __init__(self, first: Any) -> None:
        self.numbers = {hash(first): 0}
        self.parents, self.choices = array("I", [0]), array("H", [0])
        self.done = bytearray([0])
        self.sources, self.targets = array("I"), array("I")

    def number(self, state: Any, parent: int, choice: int, *, done: bool) -> tuple[int, bool]:
        """Return a state's number, and whether it is new."""
        key = hash(state)
        known = self.numbers.get(key)
        if known is not None:
            return known, False
        number = self.numbers[key] = len(self.parents)
        self.parents.append(parent)
        self.choices.append(choice)
        self.done.append(done)
        return number, True

    def way_to(self, number: int) -> list[int]:
        """Return the moves that lead to a state."""
        way: list[int] = []
        while number:
            way.append(self.choices[number])
            number = self.parents[number]
        return way[::-1]


def explore(
    rules: Rules,
    *,
    states: int = 40_000_000,
    seconds: float = 600,
    is_end: Callable[[Any], bool] = lambda state: bool(state[0].over),
) -> Found:
    """Explore a variant until an error is found, all states are explored, or a limit is reached.

    Args:
        is_end: Returns whether the job has ended in a state. Every state must have a path to such a state, without
            another fault.
    """
    began, first = time.monotonic(), initial(rules)
    seen, queue = _Seen(first), deque([(0, first)])
    limited = False
    while queue and not limited:
        at, state = queue.popleft()
        for choice, move in enumerate(moves(rules, state)):
            if move.state is None:
                way, _ = _replayed(rules, [*seen.way_to(at), choice])
                return Found(rules.name, UNSAFE, len(seen.parents), time.monotonic() - began, move.why, way)
            number, is_new = seen.number(move.state, at, choice, done=is_end(move.state))
            if is_new:
                queue.append((number, move.state))
            if not move.is_fault and number != at:
                seen.sources.append(at)
                seen.targets.append(number)
        limited = len(seen.parents) > states or time.monotonic() - began > seconds
    count = len(seen.parents)
    if limited:
        return Found(rules.name, OPEN, count, time.monotonic() - began, "cut off")
    stuck = _without_a_way_on(seen)
    if not stuck:
        return Found(rules.name, HOLDS, count, time.monotonic() - began)
    way, there = _replayed(rules, seen.way_to(stuck[0]))
    why = f"{len(stuck)} states have no path to an end"
    return Found(rules.name, STUCK, count, time.monotonic() - began, why, way, there)


def _without_a_way_on(seen: _Seen) -> list[int]:
    """Return the states from which no end can be reached without another fault."""
    count = len(seen.parents)
    head, following = array("i", [-1]) * count, array("i", [-1]) * len(seen.sources)
    for edge, target in enumerate(seen.targets):
        following[edge], head[target] = head[target], edge
    reached = seen.done
    todo = [number for number in range(count) if reached[number]]
    while todo:
        edge = head[todo.pop()]
        while edge >= 0:
            source = seen.sources[edge]
            if not reached[source]:
                reached[source] = 1
                todo.append(source)
            edge = following[edge]
    return [number for number in range(count) if not reached[number]]


def _replayed(rules: Rules, choices: list[int]) -> tuple[tuple[str, ...], Any]:
    """Return the labels of the moves on a path, and its last state."""
    state: Any = initial(rules)
    labels: list[str] = []
    for wanted in choices:
        for choice, move in enumerate(moves(rules, state)):
            if choice == wanted:
                labels.append(move.label)
                state = move.state
                break
    return tuple(labels), state
