"""What a node needs to start what belongs to a grant."""

from __future__ import annotations

from holdfast.protocol.job_spec import JobSpec
from holdfast.protocol.names import Count, Struct, Text


class PooledLaunch(Struct, frozen=True, kw_only=True):
    """A job as its nodes start it. `token`: what its coordinator is shown; `address`: the path below the pool's URL."""

    submission: Count
    spec: JobSpec
    token: Text
    address: Text
