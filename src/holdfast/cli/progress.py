"""Events in words: one plain line each, for people who watch a job."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

Event = dict[str, Any]


def loss_text(loss: float | None) -> str:
    """Return a loss as people read it; JSON has null for what is no number, or known to nobody any more."""
    return "-" if loss is None else f"{loss:.4f}"


def _nodes(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 8 else f"{len(names)} nodes"


def _recovered(event: Event) -> str:
    parts = [f"{name} {event[key]:.3f} s" for name, key in _RECOVERY_PARTS if event[key]]
    moved = f", {event['bytes_moved'] / 1e6:.1f} MB moved" if event["bytes_moved"] else ""
    detail = f" ({', '.join(parts)})" if parts else ""
    return f"recovered by {event['action']}, down {event['down_s']:.3f} s{detail}{moved}"


def _waiting(event: Event) -> str:
    nodes = f"{event['nodes']} node{'s' if event['nodes'] > 1 else ''}"
    slots = f" with {event['slots']} more expert slots" if event["slots"] else ""
    return f"waiting for {nodes}{slots}: {event['why']}"


_RECOVERY_PARTS = (("detect", "detect_s"), ("regroup", "regroup_s"), ("transfer", "transfer_s"), ("redo", "redo_s"))

_WORDS: dict[str, Callable[[Event], str]] = {
    "job_started": lambda e: f"job {e['job']} at {e['url']}{_emulated(e)}",
    "coordinator_restarted": lambda e: f"coordinator restarted at {e['url']}, term {e['term']}",
    "node_joined": lambda e: f"{e['node']} joined, workers {', '.join(map(str, e['worker_pids']))}",
    "workers_changed": lambda e: f"{e['node']} has new workers {', '.join(map(str, e['worker_pids']))}",
    "node_left": lambda e: f"{e['node']} left: {e['reason']}",
    "epoch_started": lambda e: f"epoch {e['epoch']}: {e['world']} workers on {_nodes(e['members'])} ({e['reason']})",
    "step_committed": lambda e: f"step {e['step']}: loss {loss_text(e['loss'])}, {_rate(e)}, {e['world']} workers",
    "failure_detected": lambda e: f"{e['node']} failed: {e['kind']}{_detail(e)}, seen after {e['after_s']:.3f} s",
    "recovered": _recovered,
    "job_waiting": _waiting,
    "rebalance_decided": lambda e: f"experts {'move' if e['adopted'] else 'stay'}: {e['why']}",
    "rebalanced": lambda e: f"{e['experts_moved']} experts moved, {e['down_s']:.3f} s from step to step",
    "rolled_back": lambda e: f"rolled back to step {e['to_step']}: {e['why']}",
    "checkpoint_saved": lambda e: f"checkpoint of step {e['step']}: {e['bytes'] / 1e6:.1f} MB in {e['seconds']:.2f} s",
    "checkpoint_rejected": lambda e: f"checkpoint {e['name']} cannot be used: {e['why']}",
    "job_finished": lambda e: f"done: {e['steps']} steps, {e['samples']} samples, loss {loss_text(e['final_loss'])}",
    "job_failed": lambda e: f"failed: {e['why']}",
}


def _emulated(event: Event) -> str:
    seconds = event.get("emulate_compute")
    return f"; expert computation is EMULATED: {seconds:g} s per token" if seconds else ""


def _detail(event: Event) -> str:
    return f" ({event['detail']})" if event.get("detail") else ""


def _rate(event: Event) -> str:
    return f"{event['samples'] / event['seconds']:.1f} samples/s" if event["seconds"] > 0 else "- samples/s"


def describe(event: Event) -> str:
    """Return an event's one line, without its time; one of a kind that is not known is shown as it is."""
    words = _WORDS.get(event["event"])
    return words(event) if words else str(event)


def stamped(event: Event) -> str:
    """Return an event's one line with the time of day before it."""
    return f"{datetime.fromtimestamp(event['time']):%H:%M:%S.%f}"[:-3] + f" {describe(event)}"


class PlainProgress:
    """Prints every event but steps, and of those at most one per `every_s` of the job's own time.

    Args:
        say: prints one line.
    """

    def __init__(self, say: Callable[[str], None], *, every_s: float = 1.0) -> None:
        self.failure = ""
        self._say = say
        self._every_s = every_s
        self._next_step_at = 0.0

    def __call__(self, event: Event) -> None:
        """Take one event."""
        if event["event"] == "step_committed":
            if event["time"] < self._next_step_at:
                return
            self._next_step_at = event["time"] + self._every_s
        if event["event"] == "job_failed":
            self.failure = event["why"]
        self._say(stamped(event))
