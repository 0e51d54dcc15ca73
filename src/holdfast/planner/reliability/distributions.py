"""Distributions of repair times and of gaps between failures, to draw from. Hours.

Axes: N values, S spells.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from holdfast.errors import BadInputError
from holdfast.planning.special import FloatArray, IntArray, require_fraction, require_positive


class Distribution(Protocol):
    """A positive random time, in hours: until a failure, or of a repair."""

    @property
    def mean(self) -> float:
        """The mean, in hours."""
        ...

    def draw(self, rng: np.random.Generator, size: int) -> FloatArray:
        """Return `size` independent draws, (size,)."""
        ...


@dataclass(frozen=True, slots=True)
class Exponential:
    """A memoryless distribution, as the closed forms assume."""

    mean: float

    def __post_init__(self) -> None:
        require_positive("mean", self.mean)

    def draw(self, rng: np.random.Generator, size: int) -> FloatArray:
        return rng.exponential(self.mean, size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Weibull:
    """A Weibull distribution: heavy-tailed and bursty for a shape below 1, exponential at 1."""

    shape: float
    scale: float

    def __post_init__(self) -> None:
        """Raise `BadInputError` unless shape and scale are positive."""
        require_positive("shape", self.shape)
        require_positive("scale", self.scale)

    @property
    def mean(self) -> float:
        return self.scale * math.gamma(1.0 + 1.0 / self.shape)

    def draw(self, rng: np.random.Generator, size: int) -> FloatArray:
        return self.scale * rng.weibull(self.shape, size)


@dataclass(frozen=True, kw_only=True, slots=True)
class LogNormal:
    """The exponential of a normal variable with mean `mu` and standard deviation `sigma`."""

    mu: float
    sigma: float

    def __post_init__(self) -> None:
        require_positive("sigma", self.sigma)

    @property
    def mean(self) -> float:
        return math.exp(self.mu + self.sigma**2 / 2.0)

    def draw(self, rng: np.random.Generator, size: int) -> FloatArray:
        return rng.lognormal(self.mu, self.sigma, size)


@dataclass(frozen=True, slots=True, eq=False)
class Empirical:
    """Observed values, drawn again with replacement."""

    #: (N,), 0 or more, not all 0
    values: FloatArray

    def __post_init__(self) -> None:
        """Raise `BadInputError` if there are no values, one is negative, or all are 0."""
        if self.values.size == 0 or np.any(self.values < 0) or not np.any(self.values > 0):
            raise BadInputError("empirical distribution: needs values of 0 or more, at least one above 0")

    @property
    def mean(self) -> float:
        return float(self.values.mean())

    def draw(self, rng: np.random.Generator, size: int) -> FloatArray:
        return rng.choice(self.values, size)


@dataclass(frozen=True, kw_only=True, slots=True)
class RepairMix:
    """Two kinds of repair: a share `epsilon` is automatic, the rest by ticket (sparing paper, section 4.4)."""

    epsilon: float
    auto: Distribution
    ticket: Distribution

    def __post_init__(self) -> None:
        require_fraction("epsilon", self.epsilon)

    @property
    def mean(self) -> float:
        return self.epsilon * self.auto.mean + (1.0 - self.epsilon) * self.ticket.mean

    def draw(self, rng: np.random.Generator, size: int) -> FloatArray:
        """Return `size` independent draws in hours, each automatic with probability `epsilon`, else by ticket."""
        automatic = rng.random(size) < self.epsilon
        return np.where(automatic, self.auto.draw(rng, size), self.ticket.draw(rng, size))


@dataclass(frozen=True, slots=True, eq=False)
class RateProfile:
    """How the rate of failures varies over equal spells of an observation, which then repeats."""

    spell_hours: float
    #: (S,), relative; 0 or more, not all 0
    rates: FloatArray

    def __post_init__(self) -> None:
        """Raise `BadInputError` if the spell is not positive, a rate is negative, or all rates are 0."""
        require_positive("spell_hours", self.spell_hours)
        if np.any(self.rates < 0) or not np.any(self.rates > 0):
            raise BadInputError("timeline: needs rates of 0 or more, at least one above 0")

    @property
    def span_hours(self) -> float:
        """Length of the observation."""
        return self.spell_hours * self.rates.size

    def warp(self, rng: np.random.Generator, replication: IntArray, hours: FloatArray) -> FloatArray:
        """Return the times of a process of constant rate after its rate is made to vary by this profile.

        Each replication starts at a random point of the observation. Over all such points the mean rate stays the same.
        `replication` and `hours` are (N,), and so is the result. The order within a replication is kept.
        """
        clock = np.arange(self.rates.size + 1, dtype=np.float64) * self.spell_hours
        passed = np.append(0.0, np.cumsum(self.rates / self.rates.mean())) * self.spell_hours
        start = rng.uniform(0.0, self.span_hours, int(replication.max(initial=0)) + 1)
        at = np.interp(start, clock, passed)[replication] + hours
        rounds, rest = np.divmod(at, self.span_hours)
        # A spell without failures is a step of the inverse. `interp` accepts it: only its two ends share a value.
        return rounds * self.span_hours + np.interp(rest, passed, clock) - start[replication]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaled:
    """The shape of another distribution, stretched to a given mean."""

    shape: Distribution
    mean: float

    def __post_init__(self) -> None:
        require_positive("mean", self.mean)

    def draw(self, rng: np.random.Generator, size: int) -> FloatArray:
        return self.shape.draw(rng, size) * (self.mean / self.shape.mean)
