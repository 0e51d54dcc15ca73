"""What a node's workers held and moved, over time."""

from __future__ import annotations

import msgspec

from holdfast.protocol.names import Count, Seconds, Struct, Text

#: a node tells of so many at once
MAX_MEMORY_SAMPLES = 128


class MemorySample(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="MemorySample"):
    """What a node's workers held `ago_s` before it was told, in bytes, all of them together.

    `memory`: resident in the host's memory; `sent`, `received`: state, in the lives of these processes.
    """

    ago_s: Seconds
    memory: Count
    sent: Count = 0
    received: Count = 0


class MemoryOfNode(msgspec.Struct, frozen=True, kw_only=True):
    """One node's samples, oldest first. `role`: leaver, joiner, stayer; `peak`: the most memory of all, in bytes."""

    node: Text
    role: Text
    peak: Count
    samples: tuple[MemorySample, ...]
