"""Memory and traffic of a node's workers over time."""

from __future__ import annotations

import msgspec

from holdfast.protocol.names import Count, Seconds, Struct, Text

#: most samples in a message
MAX_MEMORY_SAMPLES = 128


class MemorySample(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="MemorySample"):
    """Memory and traffic of all workers of a node together, `ago_s` seconds before the message."""

    ago_s: Seconds
    #: bytes resident in host memory
    memory: Count
    #: bytes of state sent since these processes started
    sent: Count = 0
    #: bytes of state received since these processes started
    received: Count = 0


class MemoryOfNode(msgspec.Struct, frozen=True, kw_only=True):
    """The samples of one node, oldest first."""

    node: Text
    #: leaver, joiner or stayer
    role: Text
    #: most bytes of memory
    peak: Count
    samples: tuple[MemorySample, ...]
