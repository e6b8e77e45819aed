"""Figures of repeated measurements -> one value with its spread. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from edgellm_server.probe import percentile


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """`spread` is (p25, p75) from 4 values on, else (lowest, highest)."""

    value: float
    n: int
    spread: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One server's figures of one measure, in the measure's unit."""

    n: int
    median: float
    p95: float


def summary(values: Sequence[float]) -> Summary:
    """Median and spread. Raises ValueError without values."""
    if not values:
        raise ValueError("want at least one value, have none")
    return Summary(value=statistics.median(values), n=len(values), spread=spread(values))


def spread(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 4:
        return min(values), max(values)
    quarters = statistics.quantiles(values, n=4, method="inclusive")
    return quarters[0], quarters[2]


def side(values: Sequence[float]) -> Side:
    p95 = percentile(values, 95)
    if p95 is None:
        raise ValueError("want at least one value, have none")
    return Side(n=len(values), median=statistics.median(values), p95=p95)


def pair_ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """over[i] / under[i]: measured back to back, so what slows the machine slows both.

    Raises ValueError for pairs that are not complete.
    """
    return [a / b for a, b in zip(over, under, strict=True)]


def p95_ratio(over: Sequence[Sequence[float]], under: Sequence[Sequence[float]]) -> Summary:
    """p95 of all `over` to p95 of all `under`, each in rounds that took turns.

    The spread is that of the rounds' own ratios. n is how many values each p95 is taken of.
    """
    everything_over = [value for values in over for value in values]
    everything_under = [value for values in under for value in values]
    rounds = [side(a).p95 / side(b).p95 for a, b in zip(over, under, strict=True)]
    return Summary(
        value=side(everything_over).p95 / side(everything_under).p95,
        n=min(len(everything_over), len(everything_under)),
        spread=(min(rounds), max(rounds)),
    )
