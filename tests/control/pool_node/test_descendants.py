"""All processes of a grant descend from the node's agent, and none is left once the grant is reaped."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

#: Starts `TREE`, waits until each of its processes has reported its pid, and ends all as at the end of a grant.
_NODE = """
import subprocess, sys, time
from holdfast.control.pool_node.descendants import adopt_orphans, find_descendants, kill_all, reap_orphans

adopt_orphans()
count = int(sys.argv[2])
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
said = [int(child.stdout.readline()) for _ in range(count)]
if sys.argv[3] == "orphan":
    child.wait()
assert set(said) <= {*find_descendants(), child.pid}, (said, find_descendants())
while find_descendants():
    kill_all()
    reap_orphans(())
    time.sleep(0.01)
print(*said)
"""

_STUBBORN = """
import os, signal, time
for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(name, signal.SIG_IGN)
os.write(1, b"%d\\n" % os.getpid())
time.sleep(30)
"""

_STOPPED = """
import os, signal
os.write(1, b"%d\\n" % os.getpid())
os.kill(os.getpid(), signal.SIGSTOP)
"""

#: The grandchild has its own session, and both of its ancestors have ended.
_FORKED_TWICE = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(1, b"%d\\n" % os.getpid())
        time.sleep(30)
    os._exit(0)
os.wait()
"""

#: Each process has a child that stays.
_DEEP = """
import os, time
for _ in range(3):
    if os.fork() != 0:
        break
os.write(1, b"%d\\n" % os.getpid())
time.sleep(30)
"""


@pytest.mark.parametrize(
    ("tree", "processes", "first"),
    [(_STUBBORN, 1, "stays"), (_STOPPED, 1, "stays"), (_FORKED_TWICE, 1, "orphan"), (_DEEP, 4, "stays")],
    ids=["ignores signals", "stopped", "forked twice", "deep"],
)
def test_all_processes_of_a_grant_are_ended(tree: str, processes: int, first: str) -> None:
    node = [sys.executable, "-c", _NODE, tree, str(processes), first]
    done = subprocess.run(node, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == processes
    for pid in pids:
        assert not os.path.exists(f"/proc/{pid}")
