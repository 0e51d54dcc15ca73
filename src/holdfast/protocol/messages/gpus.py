"""What a node's GPUs say of themselves."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from holdfast.protocol.names import Count, Struct

#: A node reports at most this many GPUs, and this many of the newest Xid errors of each.
MAX_GPUS, MAX_XIDS = 64, 16

ShortText = Annotated[str, Meta(max_length=256)]


class GpuFacts(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="GpuFacts"):
    """What one GPU says of itself; a fact that it does not know is 0 or empty.

    Attributes:
        index: The GPU's number in the driver, not in CUDA_VISIBLE_DEVICES.
        memory_used: In bytes, of all processes.
        memory_total: In bytes.
        temperature_c: In degrees Celsius.
        throttled: Why its clocks are lower than they could be; "" if they are not.
        ecc_errors: Memory errors that ECC could not correct, since the driver was loaded.
        xids: Xid errors that the driver has reported since the agent started, oldest first.
        problem: Why it cannot be read, "" if it can: a GPU that is lost.
    """

    index: Annotated[int, Meta(ge=0, le=MAX_GPUS - 1)]
    name: ShortText = ""
    memory_used: Count = 0
    memory_total: Count = 0
    temperature_c: Annotated[int, Meta(ge=-273, le=1000)] = 0
    throttled: ShortText = ""
    ecc_errors: Count = 0
    xids: Annotated[tuple[Count, ...], Meta(max_length=MAX_XIDS)] = ()
    problem: ShortText = ""
