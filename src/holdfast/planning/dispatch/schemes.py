"""The dispatch schemes that users can name."""

from __future__ import annotations

from holdfast.errors import BadInputError
from holdfast.planning.dispatch.interval import Interval
from holdfast.planning.dispatch.minmax import MinMax
from holdfast.planning.dispatch.proportional import Proportional
from holdfast.planning.dispatch.schedule import DispatchScheme


def schemes() -> dict[str, DispatchScheme]:
    """Return all dispatch schemes by name, the default first. `NodeInterval` is absent because it needs the nodes."""
    return {scheme.name: scheme for scheme in (Interval(), Proportional(), MinMax())}


def scheme_named(name: str) -> DispatchScheme:
    """Return a dispatch scheme by its name; raise `BadInputError` if the name is unknown."""
    known = schemes()
    if name not in known:
        raise BadInputError(f"dispatch is {name!r}: choose one of {', '.join(known)}")
    return known[name]
