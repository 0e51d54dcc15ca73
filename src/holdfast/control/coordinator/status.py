"""What /status answers: where the job stands and who is there."""

from __future__ import annotations

import dataclasses
from itertools import islice
from typing import Any

import msgspec

from holdfast.coordination.experts.blobs import experts_by_layer
from holdfast.coordination.job.awaited import awaited_by
from holdfast.coordination.job.coordinator import Coordinator
from holdfast.coordination.job.foresight import waits_for
from holdfast.coordination.lateness.stragglers import LinkPace, WorkerPace
from holdfast.coordination.membership import Node
from holdfast.observability.accounts.time_ledger import TimeLedger
from holdfast.observability.metrics import Slowness
from holdfast.protocol.layouts.layout import WHOLE
from holdfast.protocol.layouts.several import describe_layout, describe_layouts
from holdfast.protocol.messages.worker import CHECKPOINT_EVERY
from holdfast.protocol.record import Departure, Record

#: who holds a job up, told by name
MOST_AWAITED = 64
MOST_PACES = 16


def status_of(coordinator: Coordinator, ledger: TimeLedger, now: float) -> dict[str, Any]:
    """Return the job's status as plain data; `state` as `Coordinator.state` has it, `time` from its ledger.

    `awaited`: who holds the job up, as far as is known, at most `MOST_AWAITED`; `paces`: how long members compute a
    micro-batch, and `links`: how fast their data goes out, against the others' median, the slowest `MOST_PACES`;
    `clock`: the coordinator's.
    """
    record, progress = coordinator.record, coordinator.parts.progress
    plan = record.plan
    step = coordinator.parts.ledger.committed
    need = coordinator.waiting.need
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
        "leaving": [_leaving(coordinator, one) for one in record.leaving],
        "drained": [msgspec.to_builtins(one) for one in record.drained],
        "quarantined": [msgspec.to_builtins(one) for one in record.quarantined],
        "experts": _experts(record),
        "log_dir": coordinator.config.spec.output.log_dir,
        "checkpoints": [{"step": known.step, "name": known.name} for known in record.checkpoints],
        "saving": _saving(coordinator),
        "snapshot": _snapshot(coordinator),
        "time": dataclasses.asdict(ledger.account(now)),
        "awaited": [
            dataclasses.asdict(awaited) for awaited in islice(awaited_by(coordinator.parts, now), MOST_AWAITED)
        ],
        "paces": [
            {"rank": plan.rank(pace.worker) if plan else None, **dataclasses.asdict(pace)}
            for pace in paces_of(coordinator)[:MOST_PACES]
        ],
        "links": [
            {"rank": plan.rank(link.worker) if plan else None, **dataclasses.asdict(link)}
            for link in links_of(coordinator)[:MOST_PACES]
        ],
        "clock": now,
        **_layout(record),
    }


def _layout(record: Record) -> dict[str, str]:
    """Return which layout is in force, and which is on its way, where the job has any."""
    if record.layout == WHOLE and not record.layouts:
        return {}
    change, listed = record.change, f"of {describe_layouts(record.layouts)}" if record.layouts else ""
    coming = f", {describe_layout(change.after)} is on its way" if change is not None and change.kept is None else ""
    return {"layout": f"{describe_layout(record.layout)}{f' ({listed}{coming})' if listed else ''}"}


def paces_of(coordinator: Coordinator) -> list[WorkerPace]:
    """Return how fast the members compute, the slowest first."""
    plan = coordinator.record.plan
    return coordinator.parts.inquiry.stragglers.paces(plan.workers if plan else ())


def links_of(coordinator: Coordinator) -> list[LinkPace]:
    """Return how fast the members' data goes out, the slowest first."""
    plan = coordinator.record.plan
    return coordinator.parts.inquiry.stragglers.links(plan.workers if plan else ())


def slowness_of(coordinator: Coordinator) -> Slowness:
    """Return the slowest members' scores, and how often something took longer than usual, by what it was."""
    paces, links = paces_of(coordinator), links_of(coordinator)
    return Slowness(
        worker=paces[0].score if paces else None,
        link=links[0].score if links else None,
        slow={str(activity): count for activity, count in coordinator.parts.inquiry.stragglers.slow.items()},
    )


def _saving(coordinator: Coordinator) -> dict[str, Any] | None:
    """Return how often the job is saved, and by what that was chosen; None where it is not."""
    record = coordinator.record
    if not record.saves:
        return None
    return {
        "every": record.config.get(CHECKPOINT_EVERY, ""),
        "period_s": coordinator.parts.checkpoints.period_s,
        **msgspec.structs.asdict(record.saving),
    }


def _snapshot(coordinator: Coordinator) -> dict[str, int] | None:
    """Return which snapshot would serve, and on how many nodes each of its parts lies at least; None: none would."""
    newest = coordinator.parts.snapshots.newest(coordinator.parts.ledger.committed)
    return {"step": newest[0], "copies": newest[1]} if newest is not None else None


def _experts(record: Record) -> dict[str, Any] | None:
    """Return where each expert lives: per MoE layer, each node's experts, one entry per replica; None without any."""
    plan, shape = record.plan, record.expert_shape
    if plan is None or plan.expert_plan is None or shape is None:
        return None
    layers: list[dict[str, list[int]]] = [{} for _ in range(shape.layers)]
    for member, blob in zip(plan.members, plan.expert_plan.placement, strict=True):
        for layer, held in zip(layers, experts_by_layer(blob, shape), strict=True):
            layer[member.node] = sorted([*layer.get(member.node, []), *held])
    return {"fault_threshold": {"asked": plan.expert_plan.asked, "given": plan.expert_plan.given}, "layers": layers}


def _leaving(coordinator: Coordinator, one: Departure) -> dict[str, Any]:
    """Return who is about to go, or to give its place away, and what for it waits."""
    return {
        "node": one.node,
        "since": one.since,
        "stays": one.stays,
        "to": one.to,
        "waits_for": waits_for(coordinator.parts, one),
    }


def _node(coordinator: Coordinator, node: Node, now: float) -> dict[str, Any]:
    plan = coordinator.record.plan
    workers = [
        {
            "worker": info.id,
            "pid": info.attach.pid,
            "rank": plan.rank(info.id) if plan else None,
            "generation": info.entered,
            "step": coordinator.parts.ledger.applied_by(info.id),
            "finished": info.finished,
        }
        for info in node.workers.values()
    ]
    seen = max(0.0, now - node.seen)
    return {
        "node": node.name,
        "rack": node.rack,
        "zone": node.zone,
        "standby": ("warm" if coordinator.parts.standbys.ready(node.name) else "cold") if node.standby else "",
        "leaving": any(one.node == node.name for one in coordinator.record.leaving),
        "failure_rate": coordinator.members.failure_rate(node.name),
        "agent_pid": node.agent_pid,
        "seen_s_ago": seen,
        "gpus": [msgspec.structs.asdict(gpu) for gpu in node.gpus],
        "workers": workers,
    }
