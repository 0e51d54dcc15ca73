"""What a node needs to start what belongs to a grant."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from holdfast.protocol.job_spec import JobSpec
from holdfast.protocol.names import Count, Struct, Text


class PooledLaunch(Struct, frozen=True, kw_only=True, tag="PooledLaunch"):
    """A job as its nodes start it. `token`: what its coordinator is shown; `address`: the path below the pool's URL."""

    submission: Count
    spec: JobSpec
    token: Text
    #: (a path, so that nothing in it makes another host of the pool's URL)
    address: Annotated[str, Meta(pattern=r"^/[A-Za-z0-9._/-]{1,200}$")]
