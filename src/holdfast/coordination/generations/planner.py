"""The plan of the next generation: members, ranks, senders of state, experts and shares.

Axes: L layers, E experts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.experts.blobs import count_fewest_nodes, find_lost_experts
from holdfast.coordination.experts.placing import (
    PlacementQuestion,
    compute_placement,
    encode_loads,
    inherit_placement,
    keep_placement,
)
from holdfast.coordination.experts.static_experts import assign_chunks, choose_ep_size, count_usable, place_static
from holdfast.coordination.generations.assignment import divide_by_speed, divide_evenly
from holdfast.coordination.generations.decisions import NothingLeft, Verdict
from holdfast.coordination.generations.witnesses import choose_witnesses, witnesses_wanted
from holdfast.coordination.membership import Membership
from holdfast.coordination.roles import assign_roles, by_role, whole_units
from holdfast.coordination.transaction import Transaction
from holdfast.coordination.transfers import TransferHistory
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

#: From this many receivers on, each gets its state from one holder: there are enough streams.
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
    """Return the next generation's plan: first the holders of the state, in the given order, then the receivers.

    If the workers fill exactly the previous ranks, these stay. Experts are placed without a search if possible. With
    static experts, workers beyond a multiple of the EP size are left out.

    Args:
        workers: all possible members of the next generation; incomplete replica groups are left out.
        holders: the members that have the decided state; if empty, all load it.
        held_experts: the experts that each holder has.
        loads: tokens per step, layer and expert `(L, E)`, or None if unknown.
        stand_ins: the nodes that take over ranks, with the nodes that they replace.

    Returns:
        The plan, or the shortage of expert slots that prevents it.
    """
    ordered = _in_rank_order(record.plan, _in_units(workers, holders, record.layout.places), stand_ins)
    if config.spec.experiments.static_experts:
        placed = _place_statically(record, ordered, held_experts, config)
        if isinstance(placed, Shortage):
            return placed
        ordered, experts = placed
        seated = set(ordered)
        holders = [worker for worker in holders if worker in seated]
        return plan_with(record, members, assign_roles(ordered, record.layout), holders, experts, config)
    question = placement_question(record, members, ordered, held_experts, config, loads)
    # Use a quick placement; the searches come later. If no expert is held, all are created or loaded, possibly
    # elsewhere.
    experts = None
    if question is not None:
        takes = {**record.replacements_among(set(map(node_of, ordered))), **stand_ins}
        experts = (
            inherit_placement(question, record.plan, takes) or keep_placement(question) or compute_placement(question)
        )
    if isinstance(experts, Shortage):
        return experts
    return plan_with(record, members, assign_roles(ordered, record.layout), holders, experts, config)


def _in_units(workers: Sequence[str], holders: Collection[str], places: int) -> list[str]:
    """Return the workers of complete replica groups, by local rank; groups that have the state come first."""
    having, units = set(holders), whole_units(workers, places)
    first = [unit for unit in units if having.issuperset(unit)]
    rest = [unit for unit in units if not having.issuperset(unit)]
    return [worker for unit in (*first, *rest) for worker in unit]


def _seat(worker: str, stand_ins: Mapping[str, str]) -> str:
    """Return the node and index of a worker, or of the worker that it replaces."""
    node = node_of(worker)
    return f"{stand_ins[node]}/{index_of(worker)}" if node in stand_ins else node_and_index_of(worker)


def fill_same_ranks(before: GenerationPlan | None, workers: Iterable[str], stand_ins: Mapping[str, str]) -> bool:
    """Return whether the workers fill exactly the ranks of a plan, with replacements.

    A stand-in that was already a member leaves its own rank unfilled.
    """
    return before is not None and set(_seats(before, stand_ins)) == {_seat(worker, stand_ins) for worker in workers}


def _seats(before: GenerationPlan, stand_ins: Mapping[str, str]) -> list[str]:
    """Return the ranks of a plan that must be filled, as node and index."""
    return [node_and_index_of(worker) for worker in before.workers if node_of(worker) not in stand_ins]


def _in_rank_order(before: GenerationPlan | None, workers: list[str], stand_ins: Mapping[str, str]) -> list[str]:
    """Return the workers in the rank order of the plan `before`, if they fill exactly its ranks; else in the given
    order.

    Args:
        stand_ins: the nodes that take over ranks, with the nodes that they replace.
    """
    if before is None or not fill_same_ranks(before, workers, stand_ins):
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
    """Return the next generation's plan for these workers in rank order.

    Chooses the senders of state, the witnesses and, without experts, the micro-batches of each replica group.

    Args:
        roles: the workers in rank order, with their roles.
        holders: the workers that have the state; if empty, all load it.
    """
    generation, places = record.generation + 1, record.layout.places
    having = set(holders)
    receivers = [worker for worker in roles if worker not in having] if holders else []
    givers: dict[str, tuple[str, ...]] = {}
    for those, having_it in zip(by_role(receivers, places), by_role(holders, places), strict=True):
        givers |= select_senders(those, having_it, lambda worker: members.place_of(node_of(worker)), members.transfers)
    return GenerationPlan(
        term=record.term,
        generation=generation,
        members=tuple(_member(members, worker, role) for worker, role in roles.items()),
        sources={worker: LiveSource(members=givers[worker]) for worker in receivers},
        expert_plan=experts,
        secret=config.plan_secret(record.born, record.term, generation),
        witnesses=_witnesses(members, list(roles), config),
        counts=() if experts is not None else divide_micro_batches(record, list(roles)[::places], config),
        # Of a replica that is spread over several workers, the FLOP of the others are unknown.
        counts_flop=places == 1 and not (config.spec.output.flop_per_sample or record.flop_per_sample),
    )


def select_senders(
    receivers: Sequence[str],
    holders: Sequence[str],
    place_of: Callable[[str], tuple[str, str]],
    history: TransferHistory | None = None,
) -> dict[str, tuple[str, ...]]:
    """Return the senders of each receiver's state, the best first.

    Each receiver gets as many senders as there are holders for each, up to `MAX_GIVERS`: of the least used, holders in
    its rack first, then holders in its zone. With one holder for each receiver or fewer, or with many receivers, each
    gets one in turn.

    Args:
        place_of: returns the rack and the zone of a worker, "" if it named none.
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
            """Return the sort key of a holder: its uses, then whether it is outside the rack, and the zone."""
            its_rack, its_zone = place_of(holder)
            return used[holder], not (rack and its_rack == rack), not (zone and its_zone == zone)

        found[worker] = tuple(sorted(able, key=cost)[: 1 if one_each else each])
        used.update(found[worker])
    return found


def _without_failures(
    receiver: str, holders: Sequence[str], history: TransferHistory, failures: Counter[str]
) -> Sequence[str]:
    """Return the holders that have not failed with this receiver, and of these the ones with the fewest failures.

    If all have failed with it, the ones with the fewest failures of all.
    """
    node = node_of(receiver)
    candidates = [holder for holder in holders if not history.failed(node_of(holder), node)] or holders
    fewest = min(failures[node_of(holder)] for holder in candidates)
    return [holder for holder in candidates if failures[node_of(holder)] == fewest]


def divide_micro_batches(record: Record, workers: Iterable[str], config: CoordinatorConfig) -> tuple[int, ...]:
    """Return the number of micro-batches of each of these workers, in rank order; () for an even division.

    The first worker of a replica group stands for all of it, because they are on one node. Known slow nodes get fewer.

    A standby that joins next to a draining node computes nothing until that node has left: its state arrives meanwhile,
    and the others keep their shares. With experts all ranks run the same number of rounds, so smaller shares save no
    time.
    """
    workers = list(workers)
    idle = record.replacements_among(set(map(node_of, workers)))
    if record.expert_shape is not None or not (record.relieved or idle):
        return ()
    busy = [worker for worker in workers if node_of(worker) not in idle]
    factors = factors_of(record, busy, config)
    counts = divide_by_speed(record.micro_batches, factors) if max(factors) > 1.0 else ()
    if not idle:
        return counts
    each = iter(counts or divide_evenly(record.micro_batches, len(busy)))
    return tuple(0 if node_of(worker) in idle else next(each) for worker in workers)


def factors_of(record: Record, workers: Iterable[str], config: CoordinatorConfig) -> list[float]:
    """Return the relative time of a micro-batch on each of these workers, 1 unless the node is known to be slow.

    All are 1 if the job's policy for slow nodes is not `move`, even if an earlier coordinator has recorded slow nodes.
    """
    if config.spec.recovery.stragglers != "move":
        return [1.0 for _ in workers]
    return [record.relieved.get(node_of(worker), 1.0) for worker in workers]


def _witnesses(members: Membership, workers: Sequence[str], config: CoordinatorConfig) -> tuple[int, ...]:
    """Return the ranks of the witnesses, on different nodes and racks if possible: the configured number, or by the
    job's size.
    """
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
    """Return the placement problem for these workers, in rank order; None without experts.

    Args:
        held: the experts that each worker holds; workers that hold none may be missing.
        loads: tokens per step, layer and expert `(L, E)`, or None if unknown.
    """
    shape = record.expert_shape
    if shape is None:
        return None
    racks = _racks_by_node(members, workers)
    return PlacementQuestion(
        shape=shape,
        workers=tuple(workers),
        held=tuple(held.get(worker, b"") for worker in workers),
        slots=tuple(_slots_by_node(members, workers, shape).values()),
        loads=encode_loads(loads),
        fault_threshold=config.spec.recovery.fault_threshold,
        strategy=config.spec.experts.placement,
        racks=tuple(racks) if racks is not None else None,
        failure_rates=_rates_by_node(members, workers),
        window=config.spec.experts.rebalance_every or LOADS_WINDOW,
    )


def _place_statically(
    record: Record, workers: Sequence[str], held: Mapping[str, bytes], config: CoordinatorConfig
) -> tuple[list[str], ExpertPlan | None] | Shortage:
    """Return the members in rank order, perhaps fewer, and their experts (None for a dense model).

    A `Shortage` if the EP size is impossible, a node has several workers, or they are too few for one replica.
    """
    shape, size = record.expert_shape, choose_ep_size(record.expert_shape, config.spec.experiments.ep_size)
    if isinstance(size, Shortage):
        return size
    if len({node_of(worker) for worker in workers}) < len(workers):
        return Shortage(
            reason="static experts are spread over nodes of one worker each", remedy="give --workers-per-node 1"
        )
    if not count_usable(len(workers), size):
        return Shortage(
            reason=f"one replica of all experts takes {size} nodes, {len(workers)} are here",
            remedy="give more nodes, more --expert-slots, or a smaller --ep-size",
        )
    chunks = assign_chunks(workers, held, shape, size)
    ordered = [worker for worker in workers if worker in chunks]
    if shape is None:
        return ordered, None
    return ordered, place_static(shape, ordered, held, chunks, asked=config.spec.recovery.fault_threshold)


def _racks_by_node(members: Membership, workers: Sequence[str]) -> list[int] | None:
    """Return a number for each node's rack, in the order of their first workers; None if racks do not matter.

    They do not if all nodes share one, or if no two do.
    """
    nodes = dict.fromkeys(node_of(worker) for worker in workers)
    # A node without a rack counts as a rack of its own. Rack names contain no slash.
    names = [members.nodes[node].rack or f"/{node}" for node in nodes]
    known = list(dict.fromkeys(names))
    return [known.index(name) for name in names] if 1 < len(known) < len(names) else None


def _rates_by_node(members: Membership, workers: Sequence[str]) -> tuple[float, ...] | None:
    """Return the failure rates of the nodes, in the order of their first workers; None if all are equal."""
    rates = [members.failure_rate(node) for node in dict.fromkeys(node_of(worker) for worker in workers)]
    return tuple(rates) if len(set(rates)) > 1 else None


def _slots_by_node(members: Membership, workers: Sequence[str], shape: ExpertShape) -> dict[str, int]:
    """Return the expert slots per MoE layer of each of these live workers' nodes, in their order."""
    slots: dict[str, int] = {}
    for worker in workers:
        info = members.worker(worker)
        assert info is not None
        slots[node_of(worker)] = info.attach.expert_shape.slots if info.attach.expert_shape else shape.slots
    return slots


def slots_of(members: Membership, workers: Sequence[str], shape: ExpertShape) -> int:
    """Return the number of expert slots per MoE layer of these workers' nodes."""
    return sum(_slots_by_node(members, workers, shape).values())


def shortage(record: Record, members: Membership, workers: Sequence[str]) -> Shortage | None:
    """Return the shortage if these workers' nodes lack slots for all experts, or None."""
    shape = record.expert_shape
    if shape is None or shape.experts <= (slots := slots_of(members, workers, shape)):
        return None
    return Shortage(
        reason=f"{shape.experts} experts per layer do not fit the {slots} slots of the nodes",
        remedy="give more --expert-slots, or more nodes",
    )


def lacks_slots(
    transaction: Transaction, config: CoordinatorConfig, workers: Sequence[str] = (), *, retained: bool = False
) -> bool:
    """Return whether the nodes of these workers (by default of all live ones) lack slots for all experts.

    With static experts: whether they are too few for one replica of all experts. False without workers.

    Args:
        retained: without `workers`, count the usable retained workers, too.
    """
    if not workers:
        workers = [info.id for info in transaction.members.workers()]
        workers += transaction.usable_retained if retained else []
    if config.spec.experiments.static_experts:
        size = choose_ep_size(transaction.record.expert_shape, config.spec.experiments.ep_size)
        return bool(workers) and not isinstance(size, Shortage) and not count_usable(len(workers), size)
    return bool(workers) and shortage(transaction.record, transaction.members, workers) is not None


def copies_left(record: Record, names: Collection[str]) -> int:
    """Return the smallest number of copies of any part of the state on these nodes of the plan in force.

    Without experts, each node has all of it.
    """
    plan, shape = record.plan, record.expert_shape
    if plan is None or plan.expert_plan is None or shape is None:
        return len(names)
    held = zip(plan.members, plan.expert_plan.placement, strict=True)
    return count_fewest_nodes(shape, [(member.node, blob) for member, blob in held if member.node in names])


def hold_only_copy(record: Record, plan: GenerationPlan, leavers: Collection[str]) -> bool:
    """Return whether only the members `leavers` hold some part of the state, so that they cannot leave yet.

    True if they are all members; otherwise only experts can be such a part.
    """
    shape = record.expert_shape
    if set(plan.workers) <= set(leavers):
        return True
    if shape is None or plan.expert_plan is None:
        return False
    held = zip(plan.workers, plan.expert_plan.placement, strict=True)
    return bool(find_lost_experts(shape, [blob for worker, blob in held if worker not in leavers]))


def find_lost(record: Record, verdict: Verdict | NothingLeft, reports: Mapping[str, Report]) -> list[tuple[int, int]]:
    """Return the (layer, expert) pairs without a copy among the holders of the decided state.

    [] without experts, if nothing is left, or if all members create or load their own.
    """
    shape = record.expert_shape
    if shape is None or isinstance(verdict, NothingLeft):
        return []
    if verdict.decision.kind in (DecisionKind.START, DecisionKind.ROLLBACK):
        return []
    held = held_experts(verdict.decision, reports)
    return find_lost_experts(shape, [held.get(worker, b"") for worker in verdict.holders])


def held_experts(decision: Decision, reports: Mapping[str, Report]) -> dict[str, bytes]:
    """Return the experts that each reporter holds after the decision; {} if all create or load their own.

    Workers that cannot reach the decided step are left out.
    """
    if decision.kind in (DecisionKind.START, DecisionKind.ROLLBACK):
        return {}  # Every member creates or loads its own.
    found = {worker: report.holding_of(decision.applied) for worker, report in reports.items()}
    return {worker: holding.experts for worker, holding in found.items() if holding is not None}


def _member(members: Membership, worker: str, role: Role) -> Member:
    """Return the plan's entry of a live worker, with the address at which it sends state."""
    info = members.worker(worker)
    assert info is not None
    return Member(worker=worker, host=info.attach.host, state_port=info.attach.state_port, role=role)
