"""What a worker process is told by its agent, carried through the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from holdfast.errors import BadInputError

_PREFIX = "HOLDFAST_"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """One worker's settings; each field travels as HOLDFAST_<NAME>.

    socket: path of the agent's Unix socket. worker: this worker's id. host: the address to bind to and be reached at.
    local_rank: index on the node. checkpoint_dir: "" for none. checkpoint_every: steps. verify_state: hash the whole
    state after every step (a test mode). slots: the node's room for expert replicas, per MoE layer.
    emulate_compute: seconds per token that expert computation is made to take, 0 for none. script_digest: of script and
    arguments.
    """

    socket: str
    worker: str
    job: str
    host: str = "127.0.0.1"
    local_rank: int = 0
    checkpoint_dir: str = ""
    checkpoint_every: int = 100
    verify_state: bool = False
    slots: int = 6
    emulate_compute: float = 0.0
    script_digest: str = ""

    def to_environment(self) -> dict[str, str]:
        """Return the variables that carry these settings."""
        return {_PREFIX + field.name.upper(): _to_text(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> WorkerSettings | None:
        """Read the settings back; None where no agent has started this process.

        Raises:
            BadInputError: a variable does not fit its type.
        """
        if _PREFIX + "SOCKET" not in environment:
            return None
        values: dict[str, Any] = {}
        for field in fields(cls):
            text = environment.get(_PREFIX + field.name.upper())
            if text is not None:
                values[field.name] = _from_text(field.name, str(field.type), text)
        return cls(**values)


def _to_text(value: str | int | float | bool) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _from_text(name: str, kind: str, text: str) -> str | int | float | bool:
    if kind == "str":
        return text
    try:
        number = float(text) if kind == "float" else int(text)
    except ValueError:
        wanted = "number" if kind == "float" else "whole number"
        raise BadInputError(f"{_PREFIX}{name.upper()} is {text!r}: it must be a {wanted}") from None
    return bool(number) if kind == "bool" else number
