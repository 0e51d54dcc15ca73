"""Settings of the whole suite."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Properties are about results, not speed: a busy machine must not fail them.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")

# Among half a million objects of what is imported here, looking for garbage takes a twentieth of the tests' time, and a
# fifth of that of importing.
gc.set_threshold(50_000, 20, 20)

_ZYGOTE = "holdfast_zygote"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a file that share a fixture run in one of xdist's processes: else each of these makes it for itself."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None and _shares(item):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


def _shares(item: pytest.Item) -> bool:
    known = getattr(item, "_fixtureinfo", None)
    return known is not None and any(
        found.scope == "module" for name in known.names_closure for found in known.name2fixturedefs.get(name, ())
    )


def pytest_sessionstart(session: pytest.Session) -> None:
    """In one of xdist's processes: rewrite what none of them has, each another part of the tests."""
    here: dict[str, Any] | None = getattr(session.config, "workerinput", None)
    if here is not None and not sys.dont_write_bytecode:
        _rewrite(session.config, int(here["workerid"].removeprefix("gw")) / here["workercount"])


def _rewrite(config: pytest.Config, begin: float) -> None:
    """Rewrite the asserts of files that have never been imported, from a place among them on.

    As long as nothing was, all of xdist's processes would do so for all files at the same time: half a minute of
    processor. What this calls is pytest's own, and may be another in its next release: then they do.
    """
    files = sorted(Path(__file__).parent.rglob("test_*.py"))
    first = int(len(files) * begin)
    try:
        from _pytest.assertion import rewrite

        state = config.stash[rewrite.assertstate_key]
        for file in (*files[first:], *files[:first]):
            folder = rewrite.get_cache_dir(file)
            rewritten = folder / f"{file.stem}{rewrite.PYC_TAIL}"
            if not rewritten.exists() and rewrite.try_makedirs(folder):
                of_what, code = rewrite._rewrite_test(file, config)
                rewrite._write_pyc(state, code, of_what, rewritten)
    except (ImportError, AttributeError, KeyError, TypeError):
        return


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
