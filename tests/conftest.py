"""Settings of the whole suite."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Properties are about results, not speed: a busy machine must not fail them.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")
