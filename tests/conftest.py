"""Settings of the whole suite."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Properties are about results, not speed: a busy machine must not fail them.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")

_ZYGOTE = "holdfast_zygote"


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """One zygote serves all of xdist's processes; it ends with the one that has started them."""
    from warm_start import zygote  # (not above: mutants are tested without what it imports)

    config = node.config
    if not hasattr(config, _ZYGOTE):
        stack = ExitStack()
        setattr(config, _ZYGOTE, stack.enter_context(zygote()))
        config.add_cleanup(stack.close)
    node.workerinput[_ZYGOTE] = getattr(config, _ZYGOTE)


@pytest.fixture(scope="session")
def warm_torch(request: pytest.FixtureRequest) -> Iterator[str]:
    """The socket of a zygote with torch; importing that once for all tests takes much off the suite."""
    shared = getattr(request.config, "workerinput", {}).get(_ZYGOTE)
    if shared:
        yield shared
        return
    from warm_start import zygote

    with zygote() as socket_path:
        yield socket_path
