"""What `holdfast status` says beside its tables."""

from __future__ import annotations

from typing import Any

from holdfast.cli.job.look import SLOW, quarantined, saving, stragglers


def scored(node: str, rank: int, score: float) -> dict[str, Any]:
    return {"worker": f"{node}/0/abc", "rank": rank, "score": score}


def test_who_is_slow_is_named_with_what_at() -> None:
    answer = {
        "paces": [scored("n2", 1, 2.04), scored("n0", 0, SLOW - 0.01)],
        "links": [scored("n1", 3, 12.3), scored("n0", 0, 1.0)],
    }
    assert list(stragglers(answer)) == [
        "slow: n2, rank 1, computes a micro-batch in 2.0 times the others' time",
        "slow: n1, rank 3, sends the same in 12.3 times the others' time",
    ]
    assert list(stragglers({})) == []


def test_who_is_quarantined_is_named_with_what_lets_it_back() -> None:
    answer = {"quarantined": [{"node": "n1", "host": "", "why": "fan [3] stands", "since": 0.0}]}
    (line,) = quarantined(answer)
    assert line.startswith("quarantined since ")
    assert line.endswith("n1 (fan [3] stands); repaired: holdfast undrain n1")
    assert list(quarantined({})) == []


def test_the_snapshot_that_would_serve_is_shown() -> None:
    assert list(saving({"snapshot": None, "saving": None})) == []
    (line,) = saving({"snapshot": {"step": 40, "copies": 2}, "saving": None})
    assert line == "snapshot of step 40 in the nodes' memory: each part on 2 of them or more"
