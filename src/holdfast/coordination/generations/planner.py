"""Makes the next generation's plan: who is a member, in which order, who sends state to whom, who computes what.

Axes: L layers, E experts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.experts.blobs import fewest_nodes, lost_experts
from holdfast.coordination.experts.placing import PlacementQuestion, as_before, keep, loads_blob, place
from holdfast.coordination.experts.static_experts import ep_size_of, place_static, seats, usable
from holdfast.coordination.generations.assignment import divided, even
from holdfast.coordination.generations.decisions import NothingLeft, Verdict
from holdfast.coordination.generations.witnesses import choose_witnesses, witnesses_wanted
from holdfast.coordination.membership import Membership
from holdfast.coordination.roles import assign_roles, by_role, whole_units
from holdfast.coordination.transfers import TransferHistory
from holdfast.coordination.turn import Transaction
from holdfast.planning import Shortage
from holdfast.planning.arrays import FloatArray
from holdfast.protocol.messages.worker import Report
from holdfast.protocol.names import index_of, node_and_index_of, node_of
from holdfast.protocol.plan import (
    LOADS_WINDOW,
    Decision,
    DecisionKind,
    ExpertPlan,
    ExpertShape,
    GenerationPlan,
    Member,
    Role,
)
from holdfast.protocol.record import Record
from holdfast.protocol.state import MAX_GIVERS, LiveSource

#: from so many receivers on each is sent its state by one holder: there are streams enough
CROWD = 8


def plan_generation(
    record: Record,
    members: Membership,
    workers: Sequence[str],
    holders: Sequence[str],
    held_experts: Mapping[str, bytes],
    config: CoordinatorConfig,
    loads: FloatArray | None = None,
    stand_ins: Mapping[str, str] = MappingProxyType({}),
) -> GenerationPlan | Shortage:
    """Return the next generation's plan: holders of the state first, as given, then those that are sent theirs.

    Args:
        workers: all members to be. holders: those that have the decided state; none means that all load it.
        held_experts: what each holder has of the experts.
        loads: tokens per step, layer and expert `(L, E)`; None: not known.
        stand_ins: the nodes that take others' places, with those.

    Returns:
        The plan, or why there is none: too few slots for the experts.
    """
    ordered = _in_their_seats(record.plan, _in_units(workers, holders, record.layout.places), stand_ins)
    if config.spec.experiments.static_experts:
        placed = _place_statically(record, ordered, held_experts, config)
        if isinstance(placed, Shortage):
            return placed
        ordered, experts = placed
        seated = set(ordered)
        holders = [worker for worker in holders if worker in seated]
        return plan_with(record, members, assign_roles(ordered, record.layout), holders, experts, config)
    question = placement_question(record, members, ordered, held_experts, config, loads)
    # At once: the searches come later. Where nothing is held all is made or loaded anew, and may be so anywhere.
    experts = None
    if question is not None:
        takes = {**record.replacements_among(set(map(node_of, ordered))), **stand_ins}
        experts = as_before(question, record.plan, takes) or keep(question) or place(question)
    if isinstance(experts, Shortage):
        return experts
    return plan_with(record, members, assign_roles(ordered, record.layout), holders, experts, config)


def _in_units(workers: Sequence[str], holders: Collection[str], places: int) -> list[str]:
    """Return the workers of whole units, each by its places: those first whose places all have the state."""
    having, units = set(holders), whole_units(workers, places)
    first = [unit for unit in units if having.issuperset(unit)]
    rest = [unit for unit in units if not having.issuperset(unit)]
    return [worker for unit in (*first, *rest) for worker in unit]


def _seat(worker: str, stand_ins: Mapping[str, str]) -> str:
    """Return the place that a worker fills, or takes."""
    node = node_of(worker)
    return f"{stand_ins[node]}/{index_of(worker)}" if node in stand_ins else node_and_index_of(worker)


def fills_the_seats(before: GenerationPlan | None, workers: Iterable[str], stand_ins: Mapping[str, str]) -> bool:
    """Tell whether workers fill the same places of the same nodes as those of a plan, or of those they stand in for.

    Who stands in for another and was a member already leaves a place that nobody fills.
    """
    return before is not None and set(_seats(before, stand_ins)) == {_seat(worker, stand_ins) for worker in workers}


def _seats(before: GenerationPlan, stand_ins: Mapping[str, str]) -> list[str]:
    """Return the places of a plan that are to be filled, by rank."""
    return [node_and_index_of(worker) for worker in before.workers if node_of(worker) not in stand_ins]


def _in_their_seats(before: GenerationPlan | None, workers: list[str], stand_ins: Mapping[str, str]) -> list[str]:
    """Return workers in rank order: where they fill the same places as before, as these were."""
    if before is None or not fills_the_seats(before, workers, stand_ins):
        return workers
    seats = {seat: rank for rank, seat in enumerate(_seats(before, stand_ins))}
    return sorted(workers, key=lambda worker: seats[_seat(worker, stand_ins)])


def plan_with(
    record: Record,
    members: Membership,
    roles: Mapping[str, Role],
    holders: Sequence[str],
    experts: ExpertPlan | None,
    config: CoordinatorConfig,
) -> GenerationPlan:
    """Return the next generation's plan for these workers by rank, in their roles, and their experts' placement."""
    generation, places = record.generation + 1, record.layout.places
    having = set(holders)
    receivers = [worker for worker in roles if worker not in having] if holders else []
    givers: dict[str, tuple[str, ...]] = {}
    for those, having_it in zip(by_role(receivers, places), by_role(holders, places), strict=True):
        givers |= givers_of(those, having_it, lambda worker: members.place_of(node_of(worker)), members.transfers)
    return GenerationPlan(
        term=record.term,
        generation=generation,
        members=tuple(_member(members, worker, role) for worker, role in roles.items()),
        sources={worker: LiveSource(members=givers[worker]) for worker in receivers},
        expert_plan=experts,
        secret=config.plan_secret(record.born, record.term, generation),
        witnesses=_witnesses(members, list(roles), config),
        counts=() if experts is not None else counts_for(record, list(roles)[::places], config),
        # (of a replica that is spread over several workers nobody knows what the others compute of it)
        counts_flop=places == 1 and not (config.spec.output.flop_per_sample or record.flop_per_sample),
    )


def givers_of(
    receivers: Sequence[str],
    holders: Sequence[str],
    place_of: Callable[[str], tuple[str, str]],
    history: TransferHistory | None = None,
) -> dict[str, tuple[str, ...]]:
    """Return the senders of each receiver's state.

    Each receiver gets as many senders as there are holders for each, up to `MAX_GIVERS`: holders in its rack first,
    then holders in its zone. With one holder for each receiver or fewer, the holders take turns.

    Args:
        place_of: gives the rack and the zone of a worker, "" if it named none.
        history: failed transfers. A holder that failed is used only if no other is left.
    """
    each = min(MAX_GIVERS, len(holders) // len(receivers)) if receivers else 0
    one_each = each < 2 or len(receivers) >= CROWD
    if one_each and not history:
        return {worker: (holders[place % len(holders)],) for place, worker in enumerate(receivers)}
    used: Counter[str] = Counter()
    failures = history.failures_by_sender() if history else Counter[str]()
    found: dict[str, tuple[str, ...]] = {}
    for worker in receivers:
        able = _without_failures(worker, holders, history, failures) if history else holders
        rack, zone = place_of(worker)

        def cost(holder: str, rack: str = rack, zone: str = zone) -> tuple[int, bool, bool]:
            its_rack, its_zone = place_of(holder)
            return used[holder], not (rack and its_rack == rack), not (zone and its_zone == zone)

        found[worker] = tuple(sorted(able, key=cost)[: 1 if one_each else each])
        used.update(found[worker])
    return found


def _without_failures(
    receiver: str, holders: Sequence[str], history: TransferHistory, failures: Counter[str]
) -> Sequence[str]:
    """Return the holders that have not failed as senders; if none is left, those with the fewest failures."""
    node = node_of(receiver)
    candidates = [holder for holder in holders if not history.failed(node_of(holder), node)] or holders
    fewest = min(failures[node_of(holder)] for holder in candidates)
    return [holder for holder in candidates if failures[node_of(holder)] == fewest]


def counts_for(record: Record, workers: Iterable[str], config: CoordinatorConfig) -> tuple[int, ...]:
    """Return how many micro-batches each of these workers by rank is to compute; () for as many as the others.

    Of a unit of several the first stands for all: it is on the same node.

    Whoever is there for another's place computes none before that is gone: its state comes meanwhile, and the others'
    shares are what they were. With experts all ranks go through as many rounds together: then nothing is won by giving
    one of them fewer.
    """
    workers = list(workers)
    idle = record.replacements_among(set(map(node_of, workers)))
    if record.expert_shape is not None or not (record.relieved or idle):
        return ()
    busy = [worker for worker in workers if node_of(worker) not in idle]
    factors = factors_of(record, busy, config)
    counts = divided(record.micro_batches, factors) if max(factors) > 1.0 else ()
    if not idle:
        return counts
    each = iter(counts or even(record.micro_batches, len(busy)))
    return tuple(0 if node_of(worker) in idle else next(each) for worker in workers)


def factors_of(record: Record, workers: Iterable[str], config: CoordinatorConfig) -> list[float]:
    """Return how many times as long as others each of these workers takes, where it is known to be slow; else 1.

    Where a coordinator is told to do nothing about slow nodes, what one before has found does not count.
    """
    if config.spec.recovery.stragglers != "move":
        return [1.0 for _ in workers]
    return [record.relieved.get(node_of(worker), 1.0) for worker in workers]


def _witnesses(members: Membership, workers: Sequence[str], config: CoordinatorConfig) -> tuple[int, ...]:
    nodes = [node_of(worker) for worker in workers]
    wanted = config.witnesses or witnesses_wanted(len(nodes), config.spec.recovery.fault_threshold)
    return choose_witnesses([(node, members.nodes[node].rack) for node in nodes], wanted)


def placement_question(
    record: Record,
    members: Membership,
    workers: Sequence[str],
    held: Mapping[str, bytes],
    config: CoordinatorConfig,
    loads: FloatArray | None,
) -> PlacementQuestion | None:
    """Return the question where the experts of these workers, in rank order, are to live; None without experts."""
    shape = record.expert_shape
    if shape is None:
        return None
    racks = _racks_by_node(members, workers)
    return PlacementQuestion(
        shape=shape,
        workers=tuple(workers),
        held=tuple(held.get(worker, b"") for worker in workers),
        slots=tuple(_slots_by_node(members, workers, shape).values()),
        loads=loads_blob(loads),
        fault_threshold=config.spec.recovery.fault_threshold,
        strategy=config.spec.experts.placement,
        racks=tuple(racks) if racks is not None else None,
        failure_rates=_rates_by_node(members, workers),
        window=config.spec.experts.rebalance_every or LOADS_WINDOW,
    )


def _place_statically(
    record: Record, workers: Sequence[str], held: Mapping[str, bytes], config: CoordinatorConfig
) -> tuple[list[str], ExpertPlan | None] | Shortage:
    """Return the members in rank order, which need not be all, and where the experts live."""
    shape, size = record.expert_shape, ep_size_of(record.expert_shape, config.spec.experiments.ep_size)
    if isinstance(size, Shortage):
        return size
    if len({node_of(worker) for worker in workers}) < len(workers):
        return Shortage(
            reason="static experts are spread over nodes of one worker each", remedy="give --workers-per-node 1"
        )
    if not usable(len(workers), size):
        return Shortage(
            reason=f"one replica of all experts takes {size} nodes, {len(workers)} are here",
            remedy="give more nodes, more --expert-slots, or a smaller --ep-size",
        )
    chunks = seats(workers, held, shape, size)
    ordered = [worker for worker in workers if worker in chunks]
    if shape is None:
        return ordered, None
    return ordered, place_static(shape, ordered, held, chunks, asked=config.spec.recovery.fault_threshold)


def _racks_by_node(members: Membership, workers: Sequence[str]) -> list[int] | None:
    """Number the nodes' racks in the order of their first workers; None where racks tell no node from another."""
    nodes = dict.fromkeys(node_of(worker) for worker in workers)
    # A node that names no rack shares its fate with nobody: no rack's name has a slash.
    names = [members.nodes[node].rack or f"/{node}" for node in nodes]
    known = list(dict.fromkeys(names))
    return [known.index(name) for name in names] if 1 < len(known) < len(names) else None


def _rates_by_node(members: Membership, workers: Sequence[str]) -> tuple[float, ...] | None:
    """Return how often the nodes fail, in the order of their first workers; None where they are alike."""
    rates = [members.failure_rate(node) for node in dict.fromkeys(node_of(worker) for worker in workers)]
    return tuple(rates) if len(set(rates)) > 1 else None


def _slots_by_node(members: Membership, workers: Sequence[str], shape: ExpertShape) -> dict[str, int]:
    slots: dict[str, int] = {}
    for worker in workers:
        info = members.worker(worker)
        assert info is not None
        slots[node_of(worker)] = info.attach.expert_shape.slots if info.attach.expert_shape else shape.slots
    return slots


def slots_of(members: Membership, workers: Sequence[str], shape: ExpertShape) -> int:
    """Return for how many experts per MoE layer these workers' nodes have room."""
    return sum(_slots_by_node(members, workers, shape).values())


def shortage(record: Record, members: Membership, workers: Sequence[str]) -> Shortage | None:
    """Return why these workers' nodes have no room for all experts, None where they have."""
    shape = record.expert_shape
    if shape is None or shape.experts <= (slots := slots_of(members, workers, shape)):
        return None
    return Shortage(
        reason=f"{shape.experts} experts per layer do not fit the {slots} slots of the nodes",
        remedy="give more --expert-slots, or more nodes",
    )


def lacks_slots(transaction: Transaction, config: CoordinatorConfig, workers: Sequence[str] = ()) -> bool:
    """True where the nodes of these workers, by default of all, have too little room for all experts."""
    workers = workers or [info.id for info in transaction.members.workers()]
    if config.spec.experiments.static_experts:
        size = ep_size_of(transaction.record.expert_shape, config.spec.experiments.ep_size)
        return bool(workers) and not isinstance(size, Shortage) and not usable(len(workers), size)
    return bool(workers) and shortage(transaction.record, transaction.members, workers) is not None


def copies_left(record: Record, names: Collection[str]) -> int:
    """Return on how many of these nodes of the plan in force each part of the state lives at least."""
    plan, shape = record.plan, record.expert_shape
    if plan is None or plan.expert_plan is None or shape is None:
        return len(names)
    held = zip(plan.members, plan.expert_plan.placement, strict=True)
    return fewest_nodes(shape, [(member.node, blob) for member, blob in held if member.node in names])


def only_with(record: Record, plan: GenerationPlan, leavers: Collection[str]) -> bool:
    """Tell whether something lives on those members alone that are to leave: they cannot, before others have it."""
    shape = record.expert_shape
    if set(plan.workers) <= set(leavers):
        return True
    if shape is None or plan.expert_plan is None:
        return False
    held = zip(plan.workers, plan.expert_plan.placement, strict=True)
    return bool(lost_experts(shape, [blob for worker, blob in held if worker not in leavers]))


def lost_of(record: Record, verdict: Verdict | NothingLeft, reports: Mapping[str, Report]) -> list[tuple[int, int]]:
    """Return the (layer, expert) pairs of which no holder of the decided state has a copy."""
    shape = record.expert_shape
    if shape is None or isinstance(verdict, NothingLeft):
        return []
    if verdict.decision.kind in (DecisionKind.START, DecisionKind.ROLLBACK):
        return []
    held = held_experts(verdict.decision, reports)
    return lost_experts(shape, [held.get(worker, b"") for worker in verdict.holders])


def held_experts(decision: Decision, reports: Mapping[str, Report]) -> dict[str, bytes]:
    """Return what the decision leaves in each reporter's hands."""
    if decision.kind in (DecisionKind.START, DecisionKind.ROLLBACK):
        return {}  # every member makes or loads its own
    found = {worker: report.holding_of(decision.applied) for worker, report in reports.items()}
    return {worker: holding.experts for worker, holding in found.items() if holding is not None}


def _member(members: Membership, worker: str, role: Role) -> Member:
    info = members.worker(worker)
    assert info is not None
    return Member(worker=worker, host=info.attach.host, state_port=info.attach.state_port, role=role)
