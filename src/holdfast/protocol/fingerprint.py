"""Comparison of workers with the same role in every step: their training settings, and sometimes a slice of the state.

Each worker adds two numbers to the sums of the step result: a hash of at most 20 bits, and its square. By
Cauchy-Schwarz `n * sum(h * h) == sum(h) ** 2` holds if and only if all n hashes are equal. All workers have the same
sums, so they all reach the same verdict. Numbers are exact in float64 as long as `n * 2**(2 * bits)` is at most 2**53.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from holdfast.protocol.names import Count, Struct

#: Raised whenever the hash of the same settings changes.
VERSION = 1
MAX_BITS = 20
_EXACT_BITS = 53
_Hash = Annotated[int, Meta(ge=0, lt=1 << 62)]
#: most settings that are reported in words, and most characters of each
MAX_SHOWN, MAX_SHOWN_CHARACTERS = 16, 80


class Fingerprint(Struct, frozen=True, kw_only=True, tag="Fingerprint"):
    """One worker's settings and state before a step."""

    step: Count
    #: hash of the optimizers' options and of which parameters require a gradient
    settings: _Hash
    #: hash of a slice of the state after the step before, 0 if the state is not compared at this step
    state: _Hash = 0
    #: the settings in words, for messages
    shown: Annotated[tuple[Annotated[str, Meta(max_length=MAX_SHOWN_CHARACTERS)], ...], Meta(max_length=MAX_SHOWN)] = ()
    #: the worker has received or loaded its state since the last step at which all hashes of the state were equal
    received: bool = False
    version: Count = VERSION


def hash_of(data: bytes) -> int:
    """Return a hash of 62 bits."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> 2


def fingerprint_contribution(fingerprint: Fingerprint, place: int, places: int, world: int) -> list[float]:
    """Return a worker's contribution to the sums over all workers: for its own role a hash of the fingerprint and its
    square, and two zeros for each other role.

    The step is part of the hash, so two settings that collide at one step differ at the next.

    Args:
        place: this worker's role.
        places: number of roles.
        world: number of workers.
    """
    one = fingerprint
    whole = hash_of(f"{one.version} {one.step} {one.settings} {one.state}".encode())
    value = whole >> (62 - _comparable_bits(world // places))
    numbers = [0.0] * (2 * places)
    numbers[2 * place : 2 * place + 2] = float(value), float(value * value)
    return numbers


def find_unequal_roles(sums: Sequence[float], world: int) -> tuple[int, ...]:
    """Return the roles with workers of different hashes, from the sums over all `world` workers.

    `sums` are two per role: of the hashes, and of their squares. A role with a sum that is not finite counts as
    unequal.
    """
    places = len(sums) // 2
    workers = world // places
    return tuple(
        place
        for place in range(places)
        # A sum that is not finite comes from an invalid contribution.
        if not all(map(_is_whole, sums[2 * place : 2 * place + 2]))
        or workers * int(sums[2 * place + 1]) != int(sums[2 * place]) ** 2
    )


def _comparable_bits(workers: int) -> int:
    """Return how many bits of a hash can be compared between this many workers."""
    return min(MAX_BITS, (_EXACT_BITS - (workers - 1).bit_length()) // 2)


def _is_whole(number: float) -> bool:
    return number.is_integer()
