"""The modelled workers: steps, swaps, reports, and the start of a generation."""

from __future__ import annotations

from typing import Any

from explored_state import Unsafe, World


def start_next_step(world: World, number: int) -> None:
    """Start the reduction of the next step, or finish after the last step."""
    node = world.nodes[number]
    assert node.steps is not None
    step = len(node.steps) + 1
    if step > world.rules.steps:
        world.put(number, phase="D")
        world.tell(number, "finished", node.gen, len(node.steps))
        return
    reducing, voted, flags = world.ops.get((node.gen, step), (0, 0, 0))
    world.ops[(node.gen, step)] = (reducing | 1 << number, voted, flags)
    world.put(number, phase="R")


def vote(world: World, number: int) -> None:
    """Vote after all members gave their gradients: REDUCING -> READY -> VOTED."""
    node = world.nodes[number]
    assert node.steps is not None
    key = (node.gen, len(node.steps) + 1)
    reducing, voted, flags = world.ops[key]
    flags |= int(node.pending is not None and node.armed) << number
    world.ops[key] = (reducing, voted | 1 << number, flags)
    world.put(number, phase="V", ready=node.gen)


def apply(world: World, number: int) -> None:
    """Apply a step after its vote has returned: PASSED -> APPLYING -> the next step, or the pending generation."""
    node = world.nodes[number]
    assert node.steps is not None
    step, v = len(node.steps) + 1, node.ready
    swaps = world.ops[(node.gen, step)][2] == node.members and node.pending is not None
    world.put(number, steps=(*node.steps, v), ready=0)
    world.tell(number, "applied", node.gen, step, v, swaps)
    if swaps:
        assert node.pending is not None
        gen, members = node.pending
        world.put(number, gen=gen, members=members, pending=None, armed=0)
        world.tell(number, "entered", gen, step)
    elif node.armed > 1:
        lower_flag(world, number)
    start_next_step(world, number)


def lower_flag(world: World, number: int) -> None:
    """Lower the swap flag from now on."""
    node = world.nodes[number]
    world.put(number, armed=0)
    if node.pending is not None and node.armed != 3:
        world.tell(number, "disarmed", node.pending[0])


def on_disarm(world: World, number: int, generation: int) -> None:
    """Lower the swap flag at once, or after a step without a swap if others may have seen the flag."""
    node = world.nodes[number]
    if node.stop or node.phase == "X" or node.pending is None or node.pending[0] != generation or node.steps is None:
        return
    if node.phase == "V" and world.rules.waits_for_step:
        world.put(number, armed=2)
    else:
        lower_flag(world, number)


def has_voted_all(world: World, number: int) -> bool:
    """Return whether all members have voted in this node's current commit operation."""
    node = world.nodes[number]
    if node.phase != "V" or node.steps is None:
        return False
    return world.ops[(node.gen, len(node.steps) + 1)][1] == node.members


def receive(world: World, number: int) -> None:
    """Receive a whole state from a member of the generation, with the expert if this node replaces its owner."""
    node, rules = world.nodes[number], world.rules
    source = next(world.nodes[other] for other in sources(world, number))
    gen, members = node.pending if node.phase == "I" and node.pending else (node.gen, node.members)
    expert = int(rules.expert and number == rules.joiner)
    world.put(number, gen=gen, members=members, pending=None, armed=0, steps=source.steps, kept=None, expert=expert)
    world.tell(number, "entered", gen, len(source.steps or ()))
    start_next_step(world, number)


def sources(world: World, number: int) -> list[int]:
    """Return the nodes that can send a state, and the expert if needed, to a node that waits for them."""
    node, rules = world.nodes[number], world.rules
    if node.stop or node.phase not in "IE" or (node.phase == "I" and not node.pending):
        return []
    gen = node.pending[0] if node.phase == "I" and node.pending else node.gen
    there = [other for other, one in enumerate(world.nodes) if one.life and one.gen == gen and one.steps is not None]
    if rules.expert and number == rules.joiner:
        return [other for other in there if world.nodes[other].expert]
    return there


def send_report(world: World, number: int, generation: int) -> None:
    """Answer a Stop."""
    node = world.nodes[number]
    expert = node.expert if node.state is not None else 0
    world.tell(number, "report", generation, node.state, node.ready, node.passed, expert)


def stop_step(world: World, number: int, generation: int) -> list[World]:
    """Stop and report. If all votes are given, the step may have passed here or not: return both results."""
    node = world.nodes[number]
    if generation < node.gen:
        return [world]
    out = [world]
    if has_voted_all(world, number):
        passed = world.copy()
        passed.put(number, stop=generation, phase="X", passed=1)
        send_report(passed, number, generation)
        out.append(passed)
    world.put(number, stop=generation, phase="X" if node.phase in "RV" else node.phase)
    send_report(world, number, generation)
    return out


def begin_generation(world: World, number: int, order: tuple[Any, ...]) -> None:
    """Enter a new generation: finish the decided step, or wait for the decided state."""
    _, gen, members, v, step, holders = order
    node, rules = world.nodes[number], world.rules
    if gen <= max(node.gen, node.stop):
        return
    there: dict[str, Any] = {"gen": gen, "members": members, "stop": 0, "ready": 0, "passed": 0}
    there |= {"pending": None, "armed": 0}
    if not holders >> number & 1:
        kept = node.state if rules.keeps and not rules.expert else None
        world.put(number, **there, steps=None, kept=kept, phase="E", expert=0)
        return
    state = node.state
    if state is not None and v and len(state) == step - 1:
        if node.ready != v:
            raise Unsafe(f"node {number} applies the result of attempt {v} to the gradients of attempt {node.ready}")
        world.put(number, **there, steps=(*state, v), kept=None)
        world.tell(number, "applied", gen, step, v, False)
    elif state is not None and len(state) == step:
        world.put(number, **there, steps=state, kept=None)
    else:
        raise Unsafe(f"node {number} holds {state}, but must hold the state of step {step}")
    world.tell(number, "entered", gen, step)
    start_next_step(world, number)


def take(world: World, number: int) -> list[World]:
    """Handle the coordinator's next message; return the possible results."""
    order, world.downs[number] = world.downs[number][0], world.downs[number][1:]
    if order[0] == "stop":
        return stop_step(world, number, order[1])
    if order[0] == "begin":
        begin_generation(world, number, order)
    elif order[0] == "arm":
        pending = world.nodes[number].pending
        if pending is not None and pending[0] == order[1]:
            world.put(number, armed=1)
    elif order[0] == "disarm":
        on_disarm(world, number, order[1])
    elif order[0] == "void":
        pending = world.nodes[number].pending
        if pending is not None and pending[0] == order[1]:
            world.put(number, pending=None, armed=0)
    return [world]


def connect(world: World, number: int) -> None:
    """Connect to a coordinator, and report the kept state."""
    node = world.nodes[number]
    world.put(number, linked=1)
    entered = node.gen if node.steps is not None else 0
    broken = node.gen if node.phase == "X" and not node.stop else 0
    finished = node.gen if node.phase == "D" else 0
    world.ups[number] = (("hello", entered, node.state, node.stop, broken, finished),)
