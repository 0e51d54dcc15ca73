"""Which tests one of xdist's processes runs together: those of a file that share what is dear.

(xdist's own groups travel in the tests' names, where pytest 9.2 does not look for them any more.)
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
    """Hands out tests one by one, except of files that name a group or have a fixture for all their tests: at once."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        self._root = config.rootpath

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return _shared_by(self._root / path) or nodeid


@cache
def _shared_by(path: Path) -> str:
    """Return what the tests of a file are run with: those of its group, or all of the file; "" for each by itself."""
    text = path.read_text()
    named = _GROUP.search(text)
    if named:
        return named[1]
    return str(path) if _SHARED in text else ""
