"""The variants that are explored: what is built, what was built before, and rules that must not be left out."""

from __future__ import annotations

from dataclasses import dataclass

from explored_state import Rules


@dataclass(frozen=True)
class Variant:
    """What is explored, and what must come of it; `deep`: it takes long."""

    rules: Rules
    is_safe: bool = True
    deep: bool = False


BESIDE = Rules("joins beside, then leaves")
WITH_EXPERT = BESIDE.but("the same with an expert", expert=True)
INSTEAD = Rules("joins instead, by the Stop", joins="instead")
ALONE = Rules("leaves, nobody joins", joins="", stayers=2)

_FAULTS = {
    "no faults": {},
    "1 failure": {"failures": 1},
    "1 crash": {"crashes": 1},
    "2 failures": {"failures": 2},
    "1 failure, 1 crash": {"failures": 1, "crashes": 1},
}


def _under(base: Rules, *quick: str) -> list[Variant]:
    """Return a variant under each of the faults; those that are not named take long."""
    named = [(f"{base.name} | {name}", name, faults) for name, faults in _FAULTS.items()]
    return [Variant(base.but(full, **faults), deep=name not in quick) for full, name, faults in named]


def _broken(base: Rules, why: str, faults: str, *, deep: bool = False, **changes: object) -> Variant:
    return Variant(base.but(f"broken: {why} | {faults}", **changes, **_FAULTS[faults]), is_safe=False, deep=deep)


#: what `make explore` runs, and with --deep the rest
VARIANTS = [
    *_under(BESIDE, "no faults"),
    *_under(WITH_EXPERT, "no faults"),
    *_under(INSTEAD, "no faults", "1 failure", "1 crash"),
    *_under(ALONE, "no faults"),
    _broken(INSTEAD, "the leaver is not owed", "1 failure", owed="never"),
    _broken(INSTEAD, "owed until the first has entered", "1 failure", owed="entered"),
    _broken(INSTEAD, "the owed leaver is not asked", "1 failure", counted=False),
    _broken(INSTEAD, "steps are announced without the owed", "no faults", holds_up=False),
    _broken(INSTEAD, "members' steps prove the owed leaver's", "1 failure", proves_members=False),
    _broken(INSTEAD, "who has voted reports, and may pass", "no faults", promise=False),
    _broken(WITH_EXPERT, "the owed leaver's old gradients count", "1 failure", deep=True, drops_stale=False),
    _broken(WITH_EXPERT, "who was beyond counts as having it", "1 failure", deep=True, takes_back=False),
]
