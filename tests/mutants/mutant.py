"""What a mutant is: one wrong line, and why it must not pass unnoticed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """One wrong line in `file` (below src/holdfast): `new` replaces `old`, which is there exactly once."""

    name: str
    file: str
    old: str
    new: str
    #: What goes wrong if no test notices.
    why: str
    #: A few schedules catch it.
    quick: bool = False
    #: The test files (below tests/) that must catch it. Empty: schedules of the simulation and the unit tests of
    #: coordination and protocol. Mutants of the runtime and of control need it, as no schedule runs their code.
    tests: tuple[str, ...] = ()
    #: Why the mutant changes nothing; empty if it does.
    equivalent: str = ""
