"""What is foreseen of a node that is to leave: what it waits for."""

from __future__ import annotations

from holdfast.coordination.parts import JobParts
from holdfast.protocol.record import Departure


def waits_for(parts: JobParts, one: Departure) -> str:
    """Return what a node that is to leave waits for; where several things lack, what lacks first."""
    turn = parts.turn
    if one.owed:
        return f"the others, to go on without it from step {one.step}"
    if one.stays:
        warm = [name for name in turn.members.standbys if parts.standbys.ready(name)]
        if one.to:
            if one.to not in warm:
                return f"standby {one.to} to be warm"
        elif not warm:
            return "a standby to be warm"
    if turn.record.plan is None:
        return "the job to begin"
    if parts.stopping.stop is not None:
        return "the others to report where they stand"
    if turn.record.pending is not None:
        return f"generation {turn.record.pending.generation} to begin, which is being prepared"
    return "the end of a step"
