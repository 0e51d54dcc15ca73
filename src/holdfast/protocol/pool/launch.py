"""The data with which a node starts a job of the pool."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from holdfast.protocol.job_spec import JobSpec
from holdfast.protocol.names import Count, Struct, Text


class PooledLaunch(Struct, frozen=True, kw_only=True, tag="PooledLaunch"):
    """A job as its nodes start it."""

    submission: Count
    spec: JobSpec
    #: secret for the coordinator of the job
    token: Text
    #: The path below the pool's URL. Its pattern prevents that it changes the host of the URL.
    address: Annotated[str, Meta(pattern=r"^/[A-Za-z0-9._/-]{1,200}$")]
