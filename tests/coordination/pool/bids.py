"""Hypothesis strategies for the jobs that policies see."""

from __future__ import annotations

from hypothesis import strategies as st

from holdfast.coordination.pool.share.interface import Bid, Demand

MOST_NODES = 24


@st.composite
def bids(draw: st.DrawFn, *, preemptible: bool = True) -> tuple[Bid, ...]:
    """Return up to eight jobs, some of which run."""
    drawn: list[Bid] = []
    for order in range(1, draw(st.integers(1, 8)) + 1):
        least = draw(st.integers(1, 6))
        most = draw(st.integers(least, 12))
        sizes = draw(st.sets(st.integers(least, most), max_size=4))
        admitted = draw(st.booleans())
        drawn.append(
            Bid(
                name=f"j{order}",
                order=order,
                least=least,
                most=most,
                sizes=tuple(sorted(sizes)),
                weight=draw(st.sampled_from((0.5, 1.0, 1.5, 2.0))),
                priority=draw(st.integers(-1, 1)),
                has=draw(st.integers(0, most)) if admitted else 0,
                admitted=admitted,
                preemptible=preemptible and draw(st.booleans()),
                may_wait=draw(st.booleans()),
                standbys=draw(st.integers(0, 3)),
                waiting=draw(st.integers(0, 2)) if admitted else 0,
            )
        )
    return tuple(drawn)


@st.composite
def demands(draw: st.DrawFn, *, preemptible: bool = True) -> Demand:
    """Return a pool with at least as many nodes as its jobs have."""
    jobs = draw(bids(preemptible=preemptible))
    held = sum(bid.has + bid.waiting for bid in jobs)
    nodes = held + draw(st.integers(0, MOST_NODES))
    return Demand(nodes=nodes, bids=jobs, kept_back=draw(st.integers(0, min(3, nodes))))
