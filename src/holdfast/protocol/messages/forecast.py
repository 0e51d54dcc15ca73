"""What is said to users of something before it is done."""

from __future__ import annotations

from holdfast.protocol.names import Struct


class MoveForecast(Struct, frozen=True, kw_only=True, tag="MoveForecast"):
    """What is expected of one node's leaving.

    `to`: who takes its place; "": nobody. `moved_bytes`: None where no node's state has moved in this job yet.
    `wait_s`: until the others are stopped for it; None where that cannot be said. `down_s`: as `node_moved` will say
    it, from a step's end to the end of the next. `why`: what that is made of, and what of it is only guessed.
    """

    node: str
    to: str
    ranks: tuple[int, ...]
    expert_replicas: int
    moved_bytes: int | None
    wait_s: float | None
    down_s: float
    why: str


class DrainForecast(Struct, frozen=True, kw_only=True, tag="DrainForecast"):
    """What is expected of a pool's node being drained.

    `job`: whose it is; "": nobody's. `to`: who takes its place there; "": nobody. `waits`: as things are, the job keeps
    it. `cost_s`: of the job's training; None: not known before it has made a move. `why`, in words.
    """

    node: str
    why: str
    job: str = ""
    to: str = ""
    waits: bool = False
    cost_s: float | None = None
