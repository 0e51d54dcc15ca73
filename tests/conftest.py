"""Settings of the whole suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# Properties are about results, not speed: a busy machine must not fail them.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")


@pytest.fixture(scope="session")
def warm_torch() -> Iterator[str]:
    """The socket of a zygote with torch; importing that once for all of a process's tests takes much off the suite."""
    from warm_start import zygote  # (not above: mutants are tested without what it imports)

    with zygote() as socket_path:
        yield socket_path
