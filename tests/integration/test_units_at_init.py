"""Jobs with replicas over several processes of a node."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import job_cases

UNIT = Path(__file__).parent / "scripts" / "unit_at_init.py"


def test_a_layout_that_does_not_fit_the_workers_of_a_node_is_reported_once(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "holdfast", "run", "--nodes", "2", "--workers-per-node", "3"]
    command += ["--zygote", job_cases.zygote, str(UNIT), "2", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, cwd=tmp_path, env=environment)
    assert done.returncode == 2, done.stdout + done.stderr
    lines = (done.stderr + done.stdout).splitlines()
    words = "shard 2 x tensor 2 takes 4 workers per node, or a multiple of that, and this job has 3"
    found = [line for line in lines if words in line]
    # The events repeat the error with "failed: ".
    assert [line.split()[0] for line in found if "failed: " not in line] == ["holdfast:"], lines
    assert not [line for line in lines if "Traceback" in line or "formed" in line or line.startswith("[")], lines
