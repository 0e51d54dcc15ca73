"""The answer to /status: the state of the job, and its nodes."""

from __future__ import annotations

import dataclasses
from itertools import islice
from typing import Any

import msgspec

from holdfast.coordination.experts.blobs import experts_by_layer
from holdfast.coordination.hang_detection.straggler_scores import LinkPace, WorkerPace
from holdfast.coordination.job.awaited_nodes import list_awaited
from holdfast.coordination.job.coordinator import Coordinator
from holdfast.coordination.job.foresight import describe_wait
from holdfast.coordination.membership import Node
from holdfast.observability.accounts.time_ledger import TimeLedger
from holdfast.observability.metrics import Slowness
from holdfast.protocol.layouts.layout import WHOLE
from holdfast.protocol.layouts.layout_list import describe_layout, describe_layouts
from holdfast.protocol.messages.worker import CHECKPOINT_EVERY
from holdfast.protocol.record import Departure, Record

#: the most workers and nodes that are listed as awaited
MOST_AWAITED = 64
#: the most worker paces and link paces that are listed
MOST_PACES = 16


def job_status(coordinator: Coordinator, ledger: TimeLedger, now: float) -> dict[str, Any]:
    """Return the job's status as plain data: its state, step, loss, nodes, experts, checkpoints, and times.

    `awaited` lists the processes known to hold up the job, at most `MOST_AWAITED`. `paces` lists how long members
    compute a micro-batch, and `links` how fast their data goes out, both relative to the others' median, the slowest
    `MOST_PACES`. `clock` is the coordinator's time.
    """
    record, progress = coordinator.record, coordinator.context.progress
    plan = record.plan
    step = coordinator.context.ledger.committed
    need = coordinator.need_reporter.need
    return {
        "job": record.job,
        "state": coordinator.state,
        "term": record.term,
        "generation": plan.generation if plan else 0,
        "world_size": len(plan.members) if plan else 0,
        "step": step,
        "last_step": progress.last_step,
        "samples": progress.samples,
        "loss": progress.loss if step else None,
        "waiting_for": f"{need.nodes} nodes, {need.expert_slots} expert slots ({need.why})" if need is not None else "",
        "nodes": [_node(coordinator, node, now) for node in coordinator.members.nodes.values()],
        "leaving": [_leaving(coordinator, entry) for entry in record.leaving],
        "drained": [msgspec.to_builtins(entry) for entry in record.drained],
        "quarantined": [msgspec.to_builtins(entry) for entry in record.quarantined],
        "experts": _experts(record),
        "log_dir": coordinator.config.spec.output.log_dir,
        "checkpoints": [{"step": known.step, "name": known.name} for known in record.checkpoints],
        "saving": _saving(coordinator),
        "snapshot": _snapshot(coordinator),
        "time": dataclasses.asdict(ledger.account(now)),
        "awaited": [
            dataclasses.asdict(awaited) for awaited in islice(list_awaited(coordinator.context, now), MOST_AWAITED)
        ],
        "paces": [
            {"rank": plan.rank(pace.worker) if plan else None, **dataclasses.asdict(pace)}
            for pace in member_paces(coordinator)[:MOST_PACES]
        ],
        "links": [
            {"rank": plan.rank(link.worker) if plan else None, **dataclasses.asdict(link)}
            for link in link_paces(coordinator)[:MOST_PACES]
        ],
        "clock": now,
        **_layout(record),
    }


def _layout(record: Record) -> dict[str, str]:
    """Return {"layout": text} with the layout in force, and if the job lists layouts, these and the one that comes
    next, if any.

    Return {} if the job has only the default layout.
    """
    if record.layout == WHOLE and not record.layouts:
        return {}
    change, listed = record.change, f"of {describe_layouts(record.layouts)}" if record.layouts else ""
    coming = f", {describe_layout(change.after)} is on its way" if change is not None and change.kept is None else ""
    return {"layout": f"{describe_layout(record.layout)}{f' ({listed}{coming})' if listed else ''}"}


def member_paces(coordinator: Coordinator) -> list[WorkerPace]:
    """Return the pace of each member, slowest first."""
    plan = coordinator.record.plan
    return coordinator.context.hang_detection.stragglers.paces(plan.workers if plan else ())


def link_paces(coordinator: Coordinator) -> list[LinkPace]:
    """Return the rate at which the data of each member goes out, slowest first."""
    plan = coordinator.record.plan
    return coordinator.context.hang_detection.stragglers.links(plan.workers if plan else ())


def measure_slowness(coordinator: Coordinator) -> Slowness:
    """Return the scores of the slowest worker and link, or None for unknown ones, for the metrics.

    `slow` counts for each activity how often it took longer than usual.
    """
    paces, links = member_paces(coordinator), link_paces(coordinator)
    return Slowness(
        worker=paces[0].score if paces else None,
        link=links[0].score if links else None,
        slow={str(activity): count for activity, count in coordinator.context.hang_detection.stragglers.slow.items()},
    )


def _saving(coordinator: Coordinator) -> dict[str, Any] | None:
    """Return the save interval and its origin for the status, or None if the job does not save."""
    record = coordinator.record
    if not record.saves:
        return None
    return {
        "every": record.config.get(CHECKPOINT_EVERY, ""),
        "period_s": coordinator.context.checkpoints.period_s,
        **msgspec.structs.asdict(record.saving),
    }


def _snapshot(coordinator: Coordinator) -> dict[str, int] | None:
    """Return the step of the newest usable snapshot, or None without one.

    `copies` is the lowest number of nodes that have one of its parts.
    """
    newest = coordinator.context.snapshots.newest(coordinator.context.ledger.committed)
    return {"step": newest[0], "copies": newest[1]} if newest is not None else None


def _experts(record: Record) -> dict[str, Any] | None:
    """Return the experts of each node per MoE layer, and the fault threshold that was asked for and is given.

    An expert is listed once per replica. Return None without experts.
    """
    plan, shape = record.plan, record.expert_shape
    if plan is None or plan.expert_plan is None or shape is None:
        return None
    layers: list[dict[str, list[int]]] = [{} for _ in range(shape.layers)]
    for member, blob in zip(plan.members, plan.expert_plan.placement, strict=True):
        for layer, held in zip(layers, experts_by_layer(blob, shape), strict=True):
            layer[member.node] = sorted([*layer.get(member.node, []), *held])
    return {"fault_threshold": {"asked": plan.expert_plan.asked, "given": plan.expert_plan.given}, "layers": layers}


def _leaving(coordinator: Coordinator, departure: Departure) -> dict[str, Any]:
    """Return the status of a draining or moving node, with the reason why it has not left yet."""
    return {
        "node": departure.node,
        "since": departure.since,
        "stays": departure.stays,
        "to": departure.to,
        "waits_for": describe_wait(coordinator.context, departure),
    }


def _node(coordinator: Coordinator, node: Node, now: float) -> dict[str, Any]:
    """Return the status of a node: its workers with ranks and steps, its rack and zone, whether it is a warm or cold
    standby or leaves, its failure rate, seconds since its last message, and its GPUs.
    """
    plan = coordinator.record.plan
    workers = [
        {
            "worker": info.id,
            "pid": info.attach.pid,
            "rank": plan.rank(info.id) if plan else None,
            "generation": info.entered,
            "step": coordinator.context.ledger.applied_by(info.id),
            "finished": info.finished,
        }
        for info in node.workers.values()
    ]
    seen = max(0.0, now - node.seen)
    return {
        "node": node.name,
        "rack": node.rack,
        "zone": node.zone,
        "standby": ("warm" if coordinator.context.standbys.ready(node.name) else "cold") if node.standby else "",
        "leaving": any(departure.node == node.name for departure in coordinator.record.leaving),
        "failure_rate": coordinator.members.failure_rate(node.name),
        "agent_pid": node.agent_pid,
        "seen_s_ago": seen,
        "gpus": [msgspec.structs.asdict(gpu) for gpu in node.gpus],
        "workers": workers,
    }
