"""A summary of one numbered micro-batch, to compare the data of two nodes."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from holdfast.protocol.names import Struct

#: most parts of a micro-batch that are compared
MAX_PARTS = 32
#: sums of each part of floating point numbers
MAX_SUMS = 8
_ShortText = Annotated[str, Meta(max_length=256)]


class PartSummary(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="PartSummary"):
    """One tensor or value of a micro-batch."""

    #: where it is in the micro-batch, such as `[0]` or `['labels']`
    name: _ShortText
    #: its type and shape
    form: _ShortText
    #: hash of the content of anything but floating point numbers
    digest: _ShortText = ""
    #: sums of floating point numbers with different signs, and the Euclidean norm of the numbers
    sums: Annotated[tuple[float, ...], Meta(max_length=MAX_SUMS)] = ()
    norm: float = 0.0


#: Summary of a micro-batch; () if the data cannot be compared.
BatchSummary = Annotated[tuple[PartSummary, ...], Meta(max_length=MAX_PARTS)]
