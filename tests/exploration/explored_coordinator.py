"""The modelled coordinator: it handles messages, announces steps, swaps, decides, and retains the draining node."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from explored_state import ALIVE, GONE, MARKED, NOBODY, OWED, Mind, Report, Unsafe, World, bits


def takes_over(world: World) -> None:
    """Start a coordinator. It knows the record, and expects the planned nodes to reconnect."""
    none = (0,) * len(world.nodes)
    world.mind = Mind(0, world.planned, 0, (), none, world.record.known, none, 0, 0, 0)


def hear(world: World, number: int) -> None:
    """Handle a node's next message, then do all due work."""
    message, world.ups[number] = world.ups[number][0], world.ups[number][1:]
    _HEARD[message[0]](world, number, *message[1:])
    advance(world)


def advance(world: World) -> None:
    """Do all due work, in the order of the real coordinator."""
    assert world.mind is not None
    if world.mind.stopping:
        decide(world)
    if world.mind.stopping or world.record.over:
        return
    release_retained_node(world)
    boundary = announce_steps(world)
    record, mind = world.record, world.mind
    if not record.members & ~mind.finished and len(record.journal) == world.rules.steps:
        world.write(over="done")
        return
    if record.pending and not mind.armed and not record.pending[1] & ~mind.here:
        world.note(armed=1)
        world.order(record.members, "arm", record.pending[0])
    calm = not record.pending and not mind.away and record.leaver != OWED and has_entered(world)
    if boundary and calm and is_leaver_left_out(world) and not has_leaver_only_copy(world):
        stop_generation(world)


# ---- known steps ----


def record_result(world: World, step: int, v: int) -> None:
    """Record that a step has passed with the step result `v`."""
    record = world.record
    if step <= len(record.journal):
        if record.journal[step - 1] != v:
            raise Unsafe(f"step {step} was announced as attempt {record.journal[step - 1]}, but is reported as {v}")
        return
    assert world.mind is not None
    known = dict(world.mind.known)
    if known.setdefault(step, v) != v:
        raise Unsafe(f"diverged: step {step} is attempt {known[step]} and {v}")
    world.note(known=tuple(sorted(known.items())))


def record_state(world: World, number: int, step: int) -> None:
    """Record that a node holds the state of this step."""
    assert world.mind is not None
    if world.mind.stands[number] < step:
        world.note(stands=_replaced(world.mind.stands, number, step))


def record_proof(world: World, step: int, gen: int) -> None:
    """Record that a step has passed in a generation: all its members had applied the previous step."""
    assert world.mind is not None
    if gen == world.record.plan and world.mind.proven < step - 1:
        world.note(proven=step - 1)


def has_entered(world: World) -> bool:
    """Return whether all members are known to have entered the current generation."""
    record, mind = world.record, world.mind
    assert mind is not None
    return all(mind.entered[number] >= record.plan for number in bits(record.members))


def announce_steps(world: World) -> bool:
    """Announce the steps that all members and the retained node have applied. Return whether there were any."""
    rules, record, mind = world.rules, world.record, world.mind
    assert mind is not None
    counting, proven = record.members, mind.proven if has_entered(world) else 0
    if record.leaver == OWED and rules.holds_up:
        counting |= 1 << rules.leaver
        if rules.proves_members:  # steps of members prove nothing about a node that is not a member
            proven = min(proven, mind.stands[rules.leaver])
    reached = max(proven, min((mind.stands[number] for number in bits(counting)), default=0))
    known, before = dict(mind.known), len(record.journal)
    for step in range(before + 1, reached + 1):
        if step not in known:
            break
        _check_announcement(world, step, known[step])
        world.write(journal=(*world.record.journal, known[step]))
    announced = len(world.record.journal)
    if announced > before:
        world.note(known=tuple(one for one in mind.known if one[0] > announced))
        world.write(known=tuple(one for one in record.known if one[0] > announced))
    return announced > before


def _check_announcement(world: World, step: int, v: int) -> None:
    """Check that the members and the retained node have applied a step with the result `v`."""
    record = world.record
    owed = 1 << world.rules.leaver if record.leaver == OWED else 0
    for number in bits(record.members | owed):
        node = world.nodes[number]
        if node.life != ALIVE:
            continue
        state = node.state or ()
        if len(state) < step:
            raise Unsafe(f"step {step} is announced, but node {number} has applied only step {len(state)}")
        if state[step - 1] != v:
            raise Unsafe(f"step {step} is announced as attempt {v}, but node {number} has applied {state[step - 1]}")


# ---- the draining node ----


def is_leaver_left_out(world: World) -> bool:
    """Return whether the next plan leaves the draining node out if the others have all its state."""
    record, mind, rules = world.record, world.mind, world.rules
    assert mind is not None
    if record.leaver == OWED:
        return True
    if record.leaver != MARKED or not record.members >> rules.leaver & 1:
        return False
    if not rules.joins:
        return True
    joined = record.members >> rules.joiner & 1
    return bool(mind.here >> rules.joiner & 1) and (rules.joins != "instead" or not joined)


def has_leaver_only_copy(world: World) -> bool:
    """Return whether only the draining node has the expert under the current plan."""
    rules, members = world.rules, world.record.members
    return rules.expert and not (rules.joins and members >> rules.joiner & 1)


def release_retained_node(world: World) -> None:
    """Release the retained node once no other node needs its state."""
    record, mind, rules = world.record, world.mind, world.rules
    assert mind is not None
    if record.leaver != OWED:
        return
    early = rules.owed == "entered" and any(mind.entered[number] >= record.plan for number in bits(record.members))
    if mind.proven >= record.owed or not record.members & ~mind.finished or early:
        release_leaver(world)


def release_leaver(world: World) -> None:
    """Release the draining node.

    If it was retained long enough, or its process is gone, it becomes `NOBODY`. Otherwise it keeps its state, so that
    `end_without_state` detects the error.
    """
    rules, record, mind = world.rules, world.record, world.mind
    assert mind is not None
    earned = mind.proven >= record.owed or not record.members & ~mind.finished
    if world.nodes[rules.leaver].life != ALIVE or (earned and record.leaver == OWED):
        world.nodes[rules.leaver] = NOBODY
    else:
        world.put(rules.leaver, phase="G", linked=0)
    world.ups[rules.leaver] = world.downs[rules.leaver] = ()
    world.write(leaver=GONE, owed=0)
    reports = tuple(one for one in mind.reports if one.node != rules.leaver)
    without = ~(1 << rules.leaver)
    world.note(here=mind.here & without, away=mind.away & without, reports=reports)
    world.note(stands=_replaced(mind.stands, rules.leaver, 0), entered=_replaced(mind.entered, rules.leaver, 0))


# ---- failures ----


def lost(world: World, number: int) -> None:
    """Handle the loss of a node, as seen by the coordinator."""
    rules, record, mind = world.rules, world.record, world.mind
    assert mind is not None
    owed = number == rules.leaver and record.leaver == OWED
    stood = (record.members | (record.pending[1] if record.pending else 0)) >> number & 1
    reports = tuple(one for one in mind.reports if one.node != number)
    without = ~(1 << number)
    world.note(here=mind.here & without, away=mind.away & without, reports=reports)
    world.note(stands=_replaced(mind.stands, number, 0), entered=_replaced(mind.entered, number, 0))
    world.ups[number] = world.downs[number] = ()
    if owed:
        release_leaver(world)
    elif stood and (record.members >> number & 1 or not lower_flags(world)):
        stop_generation(world)
    advance(world)


def lower_flags(world: World) -> bool:
    """Order the members to lower their swap flags after a joining node is lost. Return False if that does not apply."""
    rules, record, mind = world.rules, world.record, world.mind
    assert mind is not None
    if not rules.disarms or mind.stopping or not record.pending or not record.members & mind.here:
        return False
    world.note(armed=2)
    if rules.disarms == "at once":
        give_up_pending(world)
    else:
        world.order(record.members, "disarm", record.pending[0])
    return True


def give_up_pending(world: World) -> None:
    """Give up the pending plan."""
    record = world.record
    assert record.pending is not None
    world.write(pending=None)
    world.order(record.members, "void", record.pending[0])


def stop_generation(world: World) -> None:
    """Stop the current generation. All planned nodes must report."""
    assert world.mind is not None
    if not world.mind.stopping:
        world.note(stopping=1, reports=())
        world.order(world.planned, "stop", world.record.newest)


# ---- handlers ----


def _hello(world: World, number: int, entered: int, state: Any, stopped: int, broken: int, finished: int) -> None:
    mind = world.mind
    assert mind is not None
    world.note(here=mind.here | 1 << number, away=mind.away & ~(1 << number))
    plan = world.record.plan
    if state is not None:
        record_state(world, number, len(state))
        for step, v in enumerate(state, start=1):
            record_result(world, step, v)
            if v == plan:
                record_proof(world, step, plan)
    pending = world.record.pending
    if pending and entered == pending[0]:
        promote_pending(world, len(state or ()))
    world.note(entered=_replaced(world.mind.entered, number, entered))
    if finished and finished == world.record.plan:
        world.note(finished=world.mind.finished | 1 << number)
    if world.mind.stopping:
        world.order(world.planned & 1 << number, "stop", world.record.newest)
    elif max(stopped, broken) >= world.record.plan or _has_not_entered(world, number):
        stop_generation(world)


def _has_not_entered(world: World, number: int) -> bool:
    """Return whether a member has not entered the current generation: the messages that it needs were lost."""
    assert world.mind is not None
    return bool(world.record.members >> number & 1) and world.mind.entered[number] < world.record.plan


def _applied(world: World, number: int, gen: int, step: int, v: int, swapped: bool) -> None:
    record_state(world, number, step)
    record_result(world, step, v)
    record_proof(world, step, gen)
    if swapped and gen == world.record.plan and step > len(world.record.journal):
        promote_pending(world, step)


def _entered(world: World, number: int, gen: int, step: int) -> None:
    pending = world.record.pending
    assert world.mind is not None
    if pending and gen == pending[0]:
        promote_pending(world, step)
    if gen > world.mind.entered[number]:
        world.note(entered=_replaced(world.mind.entered, number, gen))
    record_state(world, number, step)


def promote_pending(world: World, step: int) -> None:
    """Put the pending generation into force after a step that passed with all swap flags raised."""
    record = world.record
    assert world.mind is not None
    if world.mind.stopping or record.pending is None:
        return
    record_proof(world, step, record.plan)
    announce_steps(world)
    (gen, members), doomed = record.pending, world.mind.armed == 2
    world.write(plan=gen, members=members, pending=None, forward=0, step=step)
    world.note(proven=0)
    if doomed:
        stop_generation(world)


def _disarmed(world: World, number: int, gen: int) -> None:
    record, mind = world.record, world.mind
    assert mind is not None
    asked = record.pending and gen == record.pending[0] and mind.armed == 2
    if asked and not mind.stopping and record.members >> number & 1:
        give_up_pending(world)


def _finished(world: World, number: int, gen: int, step: int) -> None:
    assert world.mind is not None
    if gen == world.record.plan:
        world.note(finished=world.mind.finished | 1 << number)
    record_state(world, number, step)


def _report(world: World, number: int, gen: int, *told: Any) -> None:
    assert world.mind is not None
    if world.mind.stopping and gen == world.record.newest:
        others = [one for one in world.mind.reports if one.node != number]
        world.note(reports=tuple(sorted([*others, Report(number, *told)])))


def _complaint(world: World, number: int, gen: int) -> None:
    assert world.mind is not None
    record = world.record
    left_behind = world.mind.entered[number] <= gen < record.plan
    member = bool(record.members >> number & 1) and (gen == record.plan or left_behind)
    if member or (record.pending and gen == record.pending[0]):
        stop_generation(world)


_HEARD: dict[str, Any] = {
    "hello": _hello,
    "applied": _applied,
    "entered": _entered,
    "finished": _finished,
    "report": _report,
    "complaint": _complaint,
    "disarmed": _disarmed,
}


# ---- decisions ----


def decide(world: World) -> None:
    """Once all nodes have reported, decide the step and the members, write the decision, then send it."""
    rules, record, mind = world.rules, world.record, world.mind
    assert mind is not None
    owing = world.planned & (mind.here | mind.away) & ~sum(1 << one.node for one in mind.reports)
    if owing:
        return
    order = [*bits(record.members), *bits(record.pending[1] & ~record.members if record.pending else 0), rules.leaver]
    reports = [_counting_part(world, one) for one in sorted(mind.reports, key=lambda one: order.index(one.node))]
    _record_reports(world, reports)
    verdict = find_reachable_step(world, reports)
    if verdict is None:
        end_without_state(world)
        return
    step, v, holders = verdict
    members = sum(1 << one.node for one in reports)
    leaver = record.leaver
    standby = rules.joins == "instead" and mind.here >> rules.joiner & 1 and not members >> rules.joiner & 1
    if standby and record.members & ~(mind.here | mind.away):
        members, standby = members | 1 << rules.joiner, 0  # it replaces the lost node
    elif is_leaver_left_out(world) and members >> rules.leaver & 1:
        rest = [one for one in holders if one.node != rules.leaver]
        if _have_whole_state(world, rest) and (members & ~(1 << rules.leaver) or standby):
            holders, leaver = rest, OWED
            members = members & ~(1 << rules.leaver) | (1 << rules.joiner if standby else 0)
        else:
            leaver = MARKED
    if leaver == MARKED and not members >> rules.leaver & 1:
        leaver = GONE
    _write_decision(world, step, v, holders, members, leaver)


def _counting_part(world: World, one: Report) -> Report:
    """Return the part of a report that counts: without a retained node's gradients of a step that the others repeat."""
    record, rules = world.record, world.rules
    if one.node != rules.leaver or record.leaver != OWED or not rules.drops_stale:
        return one
    return one if record.forward and len(one.steps or ()) == record.step - 1 else one._replace(ready=0, passed=0)


def _record_reports(world: World, reports: Iterable[Report]) -> None:
    for one in reports:
        if one.steps is not None:
            record_state(world, one.node, len(one.steps))
            for step, v in enumerate(one.steps, start=1):
                record_result(world, step, v)


def find_reachable_step(world: World, reports: list[Report]) -> tuple[int, int, list[Report]] | None:
    """Return the newest step that the whole state can reach, and the nodes that can reach it.

    The second element is the step result if one of them must still apply the step (FORWARD), otherwise 0.
    """
    record = world.record
    carriers = [one for one in reports if one.steps is not None]
    known: dict[int, int] = {}
    for one in carriers:
        step = len(one.steps or ()) + 1
        if one.ready and (not world.rules.expert or all(_can_reach(other, step) for other in carriers)):
            known[step] = one.ready
    if record.forward:
        known[record.step] = record.forward
    for one in carriers:
        if one.passed:
            known[len(one.steps or ()) + 1] = one.ready
        elif one.steps:
            known[len(one.steps)] = one.steps[-1]
    steps = known.keys() | {len(one.steps or ()) for one in carriers}
    for step in sorted((step for step in steps if step >= len(record.journal)), reverse=True):
        v = known.get(step, 0)
        holders = [one for one in carriers if len(one.steps or ()) == step]
        holders += [one for one in carriers if len(one.steps or ()) == step - 1 and one.ready and one.ready == v]
        if _have_whole_state(world, holders):
            return step, v if any(len(one.steps or ()) != step for one in holders) else 0, holders
    return None


def _can_reach(one: Report, step: int) -> bool:
    there = len(one.steps or ())
    return there == step or (there == step - 1 and one.ready > 0)


def _have_whole_state(world: World, holders: list[Report]) -> bool:
    """Return whether these nodes together hold the whole state."""
    return bool(holders) and (not world.rules.expert or any(one.expert for one in holders))


def _write_decision(world: World, step: int, v: int, holders: list[Report], members: int, leaver: int) -> None:
    rules, record, mind = world.rules, world.record, world.mind
    assert mind is not None
    if step < len(record.journal):
        raise Unsafe(f"step {len(record.journal)} is announced, but step {step} is decided")
    if v:
        record_result(world, step, v)
    assert world.mind is not None
    known = tuple(one for one in world.mind.known if one[0] <= step)
    # a node beyond the decided step gets the decided state again
    held = tuple(min(stood, step) if stood <= step or not rules.takes_back else 0 for stood in world.mind.stands)
    gen = record.newest + 1
    world.note(stopping=0, reports=(), known=known, stands=held, proven=0, finished=0)
    owed = step if leaver == OWED else 0
    world.write(
        newest=gen, plan=gen, members=members, forward=v, step=step, pending=None, leaver=leaver, owed=owed, known=known
    )
    if leaver == OWED and rules.owed == "never":
        release_leaver(world)
    mask = sum(1 << one.node for one in holders)
    world.order(members, "begin", gen, members, v, step, mask)


def end_without_state(world: World) -> None:
    """End the job, because no reporting node has the whole state. Fail if another live node has it."""
    announced, rules = len(world.record.journal), world.rules
    for number, node in enumerate(world.nodes):
        whole = node.state is not None and len(node.state) >= announced and (node.expert or not rules.expert)
        if node.life == ALIVE and whole:
            raise Unsafe(f"the state is lost, although node {number} holds the state of step {len(node.state or ())}")
    world.write(over="lost")


def _replaced(values: tuple[int, ...], place: int, value: int) -> tuple[int, ...]:
    return (*values[:place], value, *values[place + 1 :])
