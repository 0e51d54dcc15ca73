"""The explored variants: the rules in use, earlier rules, and variants that each miss a necessary rule."""

from __future__ import annotations

from dataclasses import dataclass

from explored_state import Rules


@dataclass(frozen=True)
class Variant:
    """Rules to explore, and the expected verdict. `deep`: the exploration takes long."""

    rules: Rules
    is_safe: bool = True
    deep: bool = False


BESIDE = Rules("joins beside, leaves")
WITH_EXPERT = BESIDE.but("joins beside, leaves, with an expert", expert=True)
JOINED = Rules("has joined, leaves, with an expert", joins="joined", expert=True)
INSTEAD = Rules("joins instead", joins="instead")
ALONE = Rules("nobody joins", joins="", stayers=2)

_FAULTS: dict[str, dict[str, int]] = {
    "no faults": {},
    "1 failure": {"failures": 1},
    "1 crash": {"crashes": 1},
    "2 failures": {"failures": 2},
    "1 failure, 1 crash": {"failures": 1, "crashes": 1},
}


def _under(base: Rules, *quick: str) -> list[Variant]:
    """Return variants with two and three steps, for each kind of faults.

    Two steps take long unless the faults are `quick`, three steps with any fault.
    """
    found: list[Variant] = []
    for steps in (2, 3):
        for name, faults in _FAULTS.items():
            full = f"{base.name} | {steps} steps | {name}"
            deep = name not in quick if steps == 2 else name != "no faults"
            found.append(Variant(base.but(full, steps=steps, **faults), deep=deep))
    return found


def _broken(base: Rules, why: str, faults: str, *, deep: bool = False, **changes: object) -> Variant:
    return Variant(base.but(f"broken: {why} | {faults}", **changes, **_FAULTS[faults]), is_safe=False, deep=deep)


#: all variants; `make explore` runs the deep ones only with --deep
VARIANTS = [
    *_under(BESIDE, "no faults", "1 failure", "1 crash"),
    *_under(WITH_EXPERT, "no faults", "1 failure"),
    *_under(JOINED, "no faults", "1 failure"),
    *_under(INSTEAD, "no faults", "1 failure", "1 crash", "2 failures"),
    *_under(ALONE, "no faults", "1 failure"),
    _broken(BESIDE, "an armed plan is given up at once", "1 failure", steps=2, disarms="at once"),
    _broken(BESIDE, "a flag that was seen counts as down", "1 failure", steps=2, waits_for_step=False),
    _broken(INSTEAD, "the leaver is not owed", "1 failure", owed="never"),
    _broken(INSTEAD, "owed until the first has entered", "1 failure", owed="entered"),
    _broken(INSTEAD, "the owed leaver is not asked", "1 failure", counted=False),
    _broken(INSTEAD, "steps are announced without the owed", "no faults", holds_up=False),
    _broken(INSTEAD, "members' steps prove the owed leaver's", "1 failure", proves_members=False),
    _broken(JOINED, "the owed leaver's old gradients count", "1 failure", deep=True, drops_stale=False),
    _broken(JOINED, "who was beyond counts as having it", "1 failure", deep=True, takes_back=False),
]
