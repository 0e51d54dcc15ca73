"""Coverage of faults by phase: shows which combinations a long run has never tested."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tests.simulation.faults.plans import OTHER_BOUNDARIES, STEP_BOUNDARIES, FaultKind

#: the phases of a worker: the boundary that it reached last
WORKER_PHASES = ("starting", *OTHER_BOUNDARIES, "moving", *STEP_BOUNDARIES, "refused", "climbing", "adopting")
#: the coordinator's phases; "away" means that no coordinator runs
COORDINATOR_PHASES = ("waiting", "running", "swapping", "recovering", "ended", "away")

#: faults that strike a node or a worker; all others have the coordinator's phase
AT_WORKERS = frozenset(
    {
        FaultKind.KILL_NODE,
        FaultKind.SILENT_NODE,
        FaultKind.STOP_NODE,
        FaultKind.KILL_WORKER,
        FaultKind.STOP_WORKER,
        FaultKind.RAISE_APPLY,
        FaultKind.CUT,
        FaultKind.GLITCH,
        FaultKind.LAG_LISTENER,
        FaultKind.LAG_UP,
        FaultKind.LAG_DOWN,
        FaultKind.PARTITION,
        FaultKind.PARTITION_FOR_GOOD,
        FaultKind.HANG,
        FaultKind.SLOW_DISK,
        FaultKind.FULL_DISK,
        FaultKind.CORRUPT_SUM,
        FaultKind.RAISE,
        FaultKind.LINK_DOWN,
        FaultKind.CORRUPT_STATE,
        FaultKind.DIFFER,
        FaultKind.FLIP,
        FaultKind.FULL_MEMORY,
        FaultKind.BAD_SENDER,
        FaultKind.ONE_WAY,
    }
)
#: kinds of writes before which a coordinator dies
CRASHES = ("crash before Persist", "crash before Emit", "crash before Send", "crash before Close")

Seen = Counter[tuple[str, str]]


def expected() -> set[tuple[str, str]]:
    """Return the possible pairs (fault, phase), all of which a long run must have seen."""
    pairs = {(str(kind), phase) for kind in AT_WORKERS for phase in WORKER_PHASES}
    others = [str(kind) for kind in FaultKind if kind not in AT_WORKERS]
    pairs |= {(kind, phase) for kind in (*others, *CRASHES) for phase in COORDINATOR_PHASES}
    return {pair for pair in pairs if _possible(*pair)}


def _possible(kind: str, phase: str) -> bool:
    """Return whether a fault can strike in a phase at all."""
    if phase == "away":
        # No coordinator exists to be struck. A user's request is repeated until a coordinator answers.
        joins = FaultKind.JOIN, FaultKind.JOIN_UNREACHABLE, FaultKind.RETURN
        return kind in (*joins, FaultKind.DAMAGE, FaultKind.INTERRUPT)
    if kind in (FaultKind.FLIP, FaultKind.FULL_MEMORY) and phase in ("moving", "climbing", "refused"):
        return False  # these plans have dense models, flat collectives and no wrong gradients
    if (kind, phase) == (FaultKind.CORRUPT_SUM, "refused"):
        return False  # a second corruption may refuse the step a second time, which ends the job
    # Only a worker that waits for its peers can get the error that one of them is gone.
    return kind != FaultKind.GLITCH or phase in ("moving", "reducing", "voted", "climbing")


def table(seen: Seen) -> str:
    """Return a table of all pairs, one row per fault and one column per phase. A dot marks an impossible pair."""
    possible = expected()
    blocks: list[str] = []
    for phases in (WORKER_PHASES, COORDINATOR_PHASES):
        kinds = sorted({kind for kind, phase in possible if phase in phases})
        blocks.append("\n".join(_rows(seen, kinds, phases, possible)))
    return "\n\n".join(blocks)


def _rows(seen: Seen, kinds: Iterable[str], phases: tuple[str, ...], possible: set[tuple[str, str]]) -> Iterable[str]:
    widths = [max(len(phase), 6) for phase in phases]
    yield " ".join([" " * 20, *(f"{phase:>{width}}" for phase, width in zip(phases, widths, strict=True))])
    for kind in kinds:
        cells = (str(seen[kind, phase]) if (kind, phase) in possible else "." for phase in phases)
        yield " ".join([f"{kind:20}", *(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))])
