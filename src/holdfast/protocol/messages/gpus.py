"""The state of a node's GPUs, as NVIDIA's driver reports it."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from holdfast.protocol.names import Count, Struct

#: A node reports at most this many GPUs, and this many of the newest Xid errors of each.
MAX_GPUS, MAX_XIDS = 64, 16

ShortText = Annotated[str, Meta(max_length=256)]


class GpuFacts(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="GpuFacts"):
    """The state of one GPU. A fact that the driver does not know is 0 or empty.

    Attributes:
        index: The GPU's number in the driver, not in CUDA_VISIBLE_DEVICES.
        memory_used: Bytes used by all processes.
        memory_total: Bytes; 0 if the GPU shares the memory of the machine.
        temperature_c: Degrees Celsius.
        throttled: Why its clocks are lower than they could be; "" if they are not.
        ecc_errors: Memory errors since the driver was loaded that ECC could not correct.
        xids: The newest Xid errors that the driver has reported since the agent started, oldest first.
        problem: Why the GPU cannot be read, such as "GPU is lost"; "" if it can.
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
