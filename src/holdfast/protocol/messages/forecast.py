"""Forecasts for users before an action."""

from __future__ import annotations

from holdfast.protocol.names import Struct


class MoveForecast(Struct, frozen=True, kw_only=True, tag="MoveForecast"):
    """The forecast of one node's leaving."""

    node: str
    #: the replacement, or ""
    to: str
    ranks: tuple[int, ...]
    expert_replicas: int
    #: None before a state has moved in this job
    moved_bytes: int | None
    #: seconds until the other nodes stop for it, or None if unknown
    wait_s: float | None
    #: seconds from the end of a step to the end of the next, as in `node_moved`
    down_s: float
    #: the parts of `down_s`, and which of them are guesses
    why: str


class DrainForecast(Struct, frozen=True, kw_only=True, tag="DrainForecast"):
    """The forecast of draining a node of a pool."""

    node: str
    why: str
    #: the job of the node, or ""
    job: str = ""
    #: the replacement in the job, or ""
    to: str = ""
    #: whether the job keeps the node for now
    waits: bool = False
    #: seconds of the job's training, or None before it has made a move
    cost_s: float | None = None
