"""Report of missing nodes: the event `job_waiting` if a job cannot train for lack of nodes."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.coordination.experts.static_experts import choose_ep_size
from holdfast.coordination.generations.planner import lacks_slots
from holdfast.coordination.job.context import JobContext
from holdfast.coordination.membership import Node
from holdfast.coordination.transaction import Transaction
from holdfast.planning import Shortage
from holdfast.protocol.events import JobWaiting
from holdfast.protocol.names import node_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """The minimum of nodes and expert slots that the job lacks to train."""

    #: The number of missing nodes.
    nodes: int
    #: The expert slots per MoE layer that these nodes must bring; 0 without experts.
    expert_slots: int
    #: The reason in words. A new reason alone is not a new need.
    why: str = field(compare=False)


#: Why a restarted coordinator waits for nodes that may still train.
NO_NODE_CONNECTED = (
    "no node has connected to this coordinator since it started, although the job may still train on its nodes: the "
    "coordinator must listen at the address that the agents were given"
)


class NeedReporter:
    """Emits `job_waiting`, once for each need."""

    def __init__(self, context: JobContext) -> None:
        #: What the job needs to continue, or None if it needs nothing.
        self.need: Need | None = None
        self._context = context

    def update(self) -> None:
        """Compute the missing resources, and emit `job_waiting` if something else is missing than before.

        A new reason alone does not count, and nothing is emitted once nothing is missing any longer. Nothing is missing
        while workers are replaced.
        """
        # Nodes that replace their workers are not lost, and their capacity is known.
        need = None if self._context.disconnected.replacing else self._compute_need()
        if need is not None and need != self.need:
            self._context.transaction.emit(JobWaiting, nodes=need.nodes, expert_slots=need.expert_slots, why=need.why)
        self.need = need

    def _compute_need(self) -> Need | None:
        """Return the nodes and expert slots that the job lacks to start or continue, with the reason, or None.

        None also if the job is over, if it trains, or if it may continue with nodes that are disconnected or still
        starting. Before the first generation, missing nodes count only if one was refused or excluded, or if a probe is
        unclear.
        """
        context, transaction = self._context, self._context.transaction
        record, members, config = transaction.record, transaction.members, context.config
        if record.outcome:
            return None
        why = context.start_probes.unclear if record.plan is None else ""
        if why and members.complete_nodes >= context.replacements.needed:
            return Need(nodes=1, expert_slots=0, why=why)
        if record.generation == 0 or (transaction.begins_again and not members.regular):
            # Nodes that have not joined a new run yet are not reported, unless one was refused or is out.
            left, out = config.spec.nodes_to_begin - members.complete_nodes, context.escalation.excluded_nodes
            why = context.last_refusal or (f"node {out[-1].node} is out: {out[-1].why}" if 0 < left <= len(out) else "")
            return Need(nodes=left, expert_slots=0, why=why) if why and left > 0 else None
        if unreached := context.disconnected.count_unreached(config.lease_s):
            return Need(nodes=unreached, expert_slots=0, why=NO_NODE_CONNECTED)
        # While disconnected nodes may still reconnect, the job waits for their part of the state, not for more nodes.
        broken = context.interruption.stop is not None and not context.interruption.awaits(
            context.disconnected.promised
        )
        if record.plan is not None and broken and (missing := context.replacements.count_awaited_nodes(record.plan)):
            return Need(nodes=missing, expert_slots=0, why="it goes on with as many nodes as before")
        if record.plan is not None and not (broken and lacks_slots(transaction, config, retained=True)):
            return None
        if (away := context.replacements.needed - members.complete_nodes) > 0 and config.spec.recovery.waits_for_nodes:
            return Need(nodes=away, expert_slots=0, why="it goes on with as many nodes as before")
        why = "too few nodes are left for all experts" if members.regular else "no node is left"
        if config.spec.experiments.static_experts:
            return _static_need(transaction, config.spec.experiments.ep_size)
        return _slot_need(transaction, why)


def _static_need(transaction: Transaction, ep_size: int) -> Need | None:
    """Return how many nodes are missing for one replica of all experts in fixed places, or None if there are enough.

    None also if no number of nodes would be enough.
    """
    size, nodes = choose_ep_size(transaction.record.expert_shape, ep_size), len(_find_usable_nodes(transaction))
    if isinstance(size, Shortage) or nodes >= size:
        return None
    return Need(nodes=size - nodes, expert_slots=0, why=f"one replica of all experts takes {size} nodes")


def _slot_need(transaction: Transaction, why: str) -> Need | None:
    """Return the need beyond the connected nodes, or None if they can hold all experts.

    A node has the slots that its first worker reports, or the job's default while its workers start. Without experts,
    one node is enough.
    """
    shape, nodes = transaction.record.expert_shape, _find_usable_nodes(transaction)
    if shape is None:
        return None if nodes else Need(nodes=1, expert_slots=0, why=why)
    slots = 0
    for node in nodes:
        shapes = [info.attach.expert_shape for info in node.workers.values()]
        known = [own.slots for own in shapes if own is not None]
        slots += known[0] if known else shape.slots
    if slots >= shape.experts:
        return None
    missing = shape.experts - slots
    return Need(nodes=-(-missing // shape.slots), expert_slots=missing, why=why)


def _find_usable_nodes(transaction: Transaction) -> list[Node]:
    """Return the regular nodes, and the retained ones that become members again if they are needed."""
    retained = dict.fromkeys(map(node_of, transaction.usable_retained))
    return [*transaction.members.regular, *(transaction.members.nodes[name] for name in retained)]
