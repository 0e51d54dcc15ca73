"""Checks that the workers of a node match the configuration of the job."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import Any

from holdfast.coordination.generations.same_data import ADVICE, difference
from holdfast.coordination.membership import Node
from holdfast.coordination.transaction import Transaction
from holdfast.errors import EXIT_BAD_INPUT
from holdfast.protocol.layouts.layout_list import describe_layouts
from holdfast.protocol.messages.agent import EndNode
from holdfast.protocol.messages.worker import Attach
from holdfast.protocol.names import node_of
from holdfast.protocol.plan import GenerationPlan


def check_configuration(
    transaction: Transaction, node: Node, attach: Attach, goes_back: Callable[[str], bool] = lambda _: False
) -> str:
    """Take the job's configuration from its first regular worker, or compare a later worker with it. End a node that
    differs.

    Compared are settings, layouts and data, for a standby also slots, workers and script. A standby that comes first is
    not checked yet.

    Args:
        goes_back: called with the difference if the first worker after a layout change does not match. Returns whether
            the change of layout is undone; then the node stays.

    Returns:
        The differences, or "".
    """
    if why := _cannot_be(node, attach):
        return send_away(transaction, node, why)
    if not transaction.record.config and node.standby:
        # The configuration comes from a regular node.
        return ""
    if not transaction.record.config and (why := _other_work(transaction, attach)):
        why = f"node {node.name} does not fit the job: {why}"
        return why if goes_back(why) else send_away(transaction, node, why)
    if not transaction.record.config:
        transaction.change(
            config=attach.config,
            global_batch=attach.global_batch,
            micro_batches=attach.micro_batches,
            seed=attach.seed,
            expert_shape=attach.expert_shape,
            saves=attach.saves,
            saves_in_time=attach.saves_in_time,
            layout=attach.layout,
            layouts=attach.layouts,
        )
        return ""
    job, here = transaction.record.config, attach.config
    differing = [name for name in dict.fromkeys((*job, *here)) if job.get(name) != here.get(name)]
    said = [_difference(name, here.get(name, "none"), job.get(name, "none")) for name in differing]
    if attach.layouts != transaction.record.layouts:
        said.append(
            _difference(
                "layouts",
                describe_layouts(attach.layouts) or "one",
                describe_layouts(transaction.record.layouts) or "one",
            )
        )
    elif attach.layout != transaction.record.layout:
        said.append(_difference("layout", str(attach.layout), str(transaction.record.layout)))
    if other := difference(attach.data, transaction.record.data):
        said.append(f"{other}: {ADVICE}")
    if node.standby:
        said += _other_room(transaction, node, attach)
    return send_away(transaction, node, f"node {node.name} does not fit the job: {'; '.join(said)}") if said else ""


def _other_work(transaction: Transaction, attach: Attach) -> str:
    """Return how a worker's layouts, batch or seed differ from the recorded ones, which stay the same in a layout
    change.

    "" if they match, or if the record has no layouts to change between.
    """
    record = transaction.record
    if not record.layouts:
        return ""
    pairs = (
        ("layouts", describe_layouts(attach.layouts) or "one", describe_layouts(record.layouts)),
        ("global batch", attach.global_batch, record.global_batch),
        ("micro-batches", attach.micro_batches, record.micro_batches),
        ("seed", attach.seed, record.seed),
    )
    return "; ".join(_difference(name, str(here), str(job)) for name, here, job in pairs if here != job)


def send_away(transaction: Transaction, node: Node, why: str) -> str:
    """Order one node that does not match the job to end; return why."""
    transaction.send(node.connection, EndNode(exit_code=EXIT_BAD_INPUT, why=why, alone=True))
    return why


def _cannot_be(node: Node, attach: Attach) -> str:
    """Return why a worker's settings are impossible in any job, with the remedy; "" if they are possible.

    Impossible are pipeline stages, and workers or samples that the layout does not divide.
    """
    layout, places = attach.layout, attach.layout.places
    if layout.stages > 1:
        return f"layout {layout}: there are no pipelines yet; give no stages"
    if node.expected % places:
        workers = f"{node.expected} worker{'s' if node.expected > 1 else ''}"
        return (
            f"layout {layout} takes {places} workers of a node for each replica, node {node.name} has {workers}: "
            f"give --workers-per-node a multiple of {places}, or a smaller layout"
        )
    samples = attach.global_batch // attach.micro_batches if attach.micro_batches else 0
    if samples % layout.shard:
        return (
            f"a micro-batch of {samples} samples cannot be split evenly over shard {layout.shard}: "
            f"give a micro_batch that is a multiple of {layout.shard}"
        )
    return ""


def _other_room(transaction: Transaction, node: Node, attach: Attach) -> list[str]:
    """Return why a standby could not take over any node's ranks, although its configuration matches; [] if it could.

    Its expert slots, number of workers or script differ.
    """
    record, said = transaction.record, list[str]()
    mine, theirs = attach.expert_shape, record.expert_shape
    if mine is not None and theirs is not None and mine.slots != theirs.slots:
        said.append(f"expert slots are {mine.slots}, the job's are {theirs.slots}")
    on_others = {other.expected for other in transaction.members.regular}
    if on_others and node.expected not in on_others:
        said.append(f"workers per node are {node.expected}, the job's are {max(on_others)}")
    if record.script_digest and node.digest != record.script_digest:
        said.append("script or arguments differ from the job's")
    return said


def workers_by_node(plan: GenerationPlan) -> dict[str, list[str]]:
    """Return a plan's workers by node, in rank order."""
    nodes: dict[str, list[str]] = {}
    for worker in plan.workers:
        nodes.setdefault(node_of(worker), []).append(worker)
    return nodes


def wanted_places(transaction: Transaction, plan: GenerationPlan) -> dict[str, Any]:
    """Return the record's fields after a plan comes into force: `wanted`, the number of nodes that the job wants, and
    `places`.

    The number never falls here. A standby that has joined next to a node to replace it counts together with that node.
    Places are racks and zones; missing nodes keep theirs, because a replacement there is best.
    """
    record, members, here = transaction.record, transaction.members, workers_by_node(plan)
    there = len(here) - len(record.replacements_among(here))
    wanted = max(record.wanted, there)
    away = here.keys() | {one.node for one in record.drained}
    missed = [name for name in record.places if name not in away]
    names = [*missed[-(wanted - there) :], *here] if wanted > there else here
    places = {name: place for name in names if any(place := members.place_of(name))}
    return {"wanted": wanted, "places": places}


def _difference(name: str, here: str, job: str) -> str:
    """Return in words how a setting differs from the job's; of two comma-separated lists, the first differing items.

    Args:
        here: the worker's value.
        job: the job's value, not equal.
    """
    if ", " in here and ", " in job:
        both = zip_longest(here.split(", "), job.split(", "), fillvalue="none")
        here, job = next((mine, theirs) for mine, theirs in both if mine != theirs)
        name = f"the first of the {name} that differs"
    return f"{name} is {here}, the job's is {job}"
