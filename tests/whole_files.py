"""Selects the tests that one xdist process runs together: tests of a file that share something expensive.

xdist's own groups are part of the test names, where pytest 9.2 no longer looks for them.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

_GROUP = re.compile(r'pytest\.mark\.xdist_group\("([\w ]+)"\)')
_SHARED = 'scope="module"'


class WholeFiles(LoadScopeScheduling):
    """Schedules tests one by one, except files with a group or a shared fixture, which are scheduled as a whole."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        self._root = config.rootpath

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return _shared_by(self._root / path) or nodeid


@cache
def _shared_by(path: Path) -> str:
    """Return the key under which a file's tests run together: the group, the file, or "" for separate runs."""
    text = path.read_text()
    named = _GROUP.search(text)
    if named:
        return named[1]
    return str(path) if _SHARED in text else ""
