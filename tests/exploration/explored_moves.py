"""The possible moves in a state: messages, returns of collectives, and faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import explored_coordinator as coordinator
import explored_workers as workers
from explored_state import ALIVE, DEAD, EXPELLED, NOBODY, Rules, Unsafe, World


class Move(NamedTuple):
    """A possible move and its result: the next state, or None if it breaks an invariant (`why`)."""

    label: str
    is_fault: bool
    state: tuple[Any, ...] | None
    why: str = ""


#: applied to a copy of the state; returns a list of the possible results, or None for the copy itself
Act = Callable[[World], Any]


def moves(rules: Rules, state: tuple[Any, ...]) -> Iterator[Move]:
    """Yield all possible moves in a state, in an order that depends only on the state."""
    world = World(rules, state)
    if world.record.over:
        return
    for label, is_fault, act in _possible(world):
        here = world.copy()
        try:
            found = act(here)
            for one in found if isinstance(found, list) else (here,):
                agree(one)
                yield Move(label, is_fault, one.frozen())
        except Unsafe as wrong:
            yield Move(label, is_fault, None, str(wrong))


def _possible(world: World) -> Iterator[tuple[str, bool, Act]]:
    for number in range(len(world.nodes)):
        yield from _of_node(world, number)
        yield from _faults(world, number)
    mind = world.mind
    if mind is None:
        yield "a new coordinator starts", False, coordinator.takes_over
        return
    for number, up in enumerate(world.ups):
        if up:
            yield f"the coordinator handles {up[0][0]} from node {number}", False, _call(coordinator.hear, number)
    if world.budget[1]:
        yield "the coordinator dies", True, _crash


def _of_node(world: World, number: int) -> Iterator[tuple[str, bool, Act]]:
    node, mind = world.nodes[number], world.mind
    if node.phase == "G":
        return
    known = mind is not None and (mind.here | mind.away) >> number & 1
    if node.life == DEAD:
        if known:
            yield f"the coordinator loses node {number}", False, _call(coordinator.lost, number)
        return
    what = f"step {_step(world, number)} of generation {node.gen}"
    if _may_vote(world, number):
        yield f"node {number} votes for {what}", False, _call(workers.vote, number)
    if not node.stop and workers.has_voted_all(world, number):
        yield f"node {number} applies {what}", False, _call(workers.apply, number)
    if workers.sources(world, number):
        yield f"node {number} receives the state", False, _call(workers.receive, number)
    if node.life == ALIVE and world.downs[number]:
        yield f"node {number} handles {world.downs[number][0][0]}", False, _call(workers.take, number)
    if node.life == ALIVE and not node.linked and mind is not None and _may_come(world, number):
        yield f"node {number} connects", False, _call(workers.connect, number)
    if node.life == EXPELLED and mind is not None and mind.away >> number & 1:
        yield f"the coordinator gives up node {number}", False, _call(coordinator.lost, number)
        yield f"node {number} reconnects with its state", False, _call(_back, number)


def _may_vote(world: World, number: int) -> bool:
    node = world.nodes[number]
    if node.stop or node.phase != "R":
        return False
    return world.ops[(node.gen, _step(world, number))][0] == node.members


def _step(world: World, number: int) -> int:
    return len(world.nodes[number].steps or ()) + 1


def _may_come(world: World, number: int) -> bool:
    """Return whether a disconnected node may connect: if the coordinator waits for it, or if it is a standby."""
    assert world.mind is not None
    standby = number == world.rules.joiner and not world.nodes[number].gen and not world.planned >> number & 1
    return bool(world.mind.away >> number & 1) or standby


def _faults(world: World, number: int) -> Iterator[tuple[str, bool, Act]]:
    node, mind = world.nodes[number], world.mind
    if node.life != ALIVE or node.phase == "G" or not world.budget[0]:
        return
    yield f"FAULT: node {number} dies", True, _call(_die, number)
    if mind is not None and (mind.here | mind.away) >> number & 1:
        yield f"FAULT: node {number} is expelled but lives", True, _call(_expel, number)
    if world.budget[2] and not node.stop and node.phase in "RV":
        yield f"FAULT: a collective fails on node {number}", True, _call(_fail, number)


def _call(act: Callable[[World, int], Any], number: int) -> Act:
    return lambda world: act(world, number)


def _die(world: World, number: int) -> None:
    world.budget[0] -= 1
    world.nodes[number] = NOBODY
    world.downs[number] = ()
    if world.mind is None:
        world.ups[number] = ()


def _expel(world: World, number: int) -> None:
    world.budget[0] -= 1
    world.put(number, life=EXPELLED, linked=0)
    coordinator.lost(world, number)


def _back(world: World, number: int) -> None:
    world.put(number, life=ALIVE)
    workers.connect(world, number)


def _fail(world: World, number: int) -> None:
    world.budget[0] -= 1
    world.budget[2] -= 1
    world.put(number, phase="X")
    world.tell(number, "complaint", world.nodes[number].gen)


def _crash(world: World) -> None:
    world.budget[1] -= 1
    world.mind = None
    for number, node in enumerate(world.nodes):
        world.ups[number] = world.downs[number] = ()
        if node.linked:
            world.put(number, linked=0)
        if node.armed == 2:
            world.put(number, armed=3)


def agree(world: World) -> None:
    """Check that the members of the current plan and the journal agree on every step.

    Raises:
        Unsafe: They disagree.
    """
    record, longest = world.record, world.record.journal
    for number, node in enumerate(world.nodes):
        counts = node.life == ALIVE and record.members >> number & 1 and node.gen >= record.plan
        if not counts or node.steps is None:
            continue
        both = min(len(longest), len(node.steps))
        if longest[:both] != node.steps[:both]:
            raise Unsafe(f"one step has two results: {longest}, and {node.steps} on node {number}")
        longest = max(longest, node.steps, key=len)
