"""`holdfast agent` as a user starts it on another machine: with a token, over TLS, and with wrong ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from server_bench import PATIENCE_S, CoordinatorProcess, make_certificate

from places import CONTROL_SCRIPTS

TRAINING = CONTROL_SCRIPTS / "fake_training.py"


def run_agent(url: str, folder: Path, token: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "holdfast", "agent", "--address", url, "--node-name", "far", *options]
    return subprocess.run(
        [*command, str(TRAINING), "--steps", "5"],
        env={**os.environ, "HOLDFAST_TOKEN": token, "XDG_RUNTIME_DIR": str(folder), "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_an_agent_trains_over_tls(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    with CoordinatorProcess(
        tmp_path, tls_cert=cert, tls_key=key, token="t", events=tmp_path / "events.jsonl"
    ) as coordinator:
        done = run_agent(coordinator.entry.url, tmp_path, "t", "--tls-ca", str(cert))
        assert done.returncode == 0
        (line,) = done.stderr.splitlines()
        assert f"node far is connected to job j at {coordinator.entry.url}" in line
        assert coordinator.wait() == 0
    assert '"event":"job_finished"' in (tmp_path / "events.jsonl").read_text()


def test_a_coordinator_with_an_untrusted_certificate_is_refused(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    with CoordinatorProcess(tmp_path, tls_cert=cert, tls_key=key, token="t") as coordinator:
        done = run_agent(coordinator.entry.url, tmp_path, "t")
    assert done.returncode != 0
    assert "certificate" in done.stderr.lower()
    assert "Traceback" not in done.stderr


def test_a_wrong_token_is_refused(tmp_path: Path) -> None:
    with CoordinatorProcess(tmp_path, token="t") as coordinator:
        done = run_agent(coordinator.entry.url, tmp_path, "wrong")
    assert done.returncode == 2
    assert "token" in done.stderr
