"""Tests that `holdfast stop` names the saved step, also if no new checkpoint was needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from holdfast.cli.following.stop import await_end, describe_saved
from holdfast.control.client import CoordinatorClient
from holdfast.protocol.events import AnyEvent, CheckpointSaved, JobFinished


class Told(CoordinatorClient):
    """Returns these events."""

    def __init__(self, *events: AnyEvent) -> None:
        self.told = events

    def events(self, after: int = 0, *, follow: bool = False, patience_s: float = 30.0) -> Iterator[AnyEvent]:
        return (event for event in self.told if event.seq > after)


def stamped(seq: int) -> dict[str, Any]:
    return {"time": float(seq), "job": "job", "term": 1, "generation": 1, "seq": seq}


def checkpoint(seq: int, step: int) -> CheckpointSaved:
    return CheckpointSaved(**stamped(seq), step=step, save_s=0.1, saved_bytes=1)


END = JobFinished(
    **stamped(9), reason="stopped", why="holdfast stop", resumable=True, steps=7, samples=7, final_loss=1.0
)
SAVES = {"every": "5"}


@pytest.mark.parametrize(
    ("kept", "saving", "events", "said"),
    [
        ((5,), SAVES, (checkpoint(8, 7),), "step 7 is saved"),
        ((5, 7), SAVES, (), "step 7 is saved"),
        ((5,), SAVES, (), "step 5 is saved"),
        ((), SAVES, (), "nothing is saved"),
        ((), None, (), "nothing is saved: the job keeps no checkpoints (--checkpoint-dir)"),
    ],
    ids=["at its end", "just before", "not its end", "none", "none is kept"],
)
def test_stop_reports_the_saved_step(
    kept: Sequence[int], saving: dict[str, str] | None, events: Sequence[AnyEvent], said: str
) -> None:
    before = {"events": 3, "checkpoints": [{"step": step, "name": ""} for step in kept], "saving": saving}
    told = Told(checkpoint(2, 4), *events, END)
    end, step = await_end(told, before, save=True)
    assert end == END
    assert describe_saved(before, step) == said
