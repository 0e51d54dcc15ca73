"""Four nodes on this machine train a Mixture-of-Experts model; one is killed half-way, another joins; watch it go on.

    make demo

Shows the job live, sums up at the end what happened and what each recovery cost, and draws out/demo.png.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from holdfast.protocol.events import JobStarted, StepCommitted
from holdfast.testing.local_job import EventLog, JobTimeoutError

ROOT = Path(__file__).resolve().parent.parent
#: with these sizes a step takes about 0.2 s on two cores
TRAINING = ("--layers", "4", "--dim", "64", "--hidden", "128", "--context", "32")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--out", type=Path, default=ROOT / "out", help="folder for events and plot")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    events_file = options.out / "demo.jsonl"
    events_file.unlink(missing_ok=True)
    holdfast = (sys.executable, "-m", "holdfast")
    script = ROOT / "examples" / "moe_gpt.py"
    command = (*holdfast, "run", "--nodes", "4", "--events", str(events_file), str(script), *TRAINING)
    job = subprocess.Popen((*command, "--steps", str(options.steps)))
    log = EventLog(events_file, alive=lambda: job.poll() is None)
    log.follow()
    threading.Thread(target=harm, args=(log, holdfast, options.steps), daemon=True).start()
    try:
        code = job.wait()
    except KeyboardInterrupt:
        code = job.wait()
    log.unfollow()
    if code == 0:
        subprocess.run((*holdfast, "report", str(events_file), "--plot", str(options.out / "demo.png")), check=True)
    return code


def harm(log: EventLog, holdfast: tuple[str, ...], steps: int) -> None:
    """Kill a node half-way through, the hard way, and add another one a little later."""
    try:
        log.wait(StepCommitted, step=steps // 2, timeout=3600)
        victim = log.nodes()[1]
        agent, workers = log.pids(victim)
        for pid in (*workers, agent):
            os.kill(pid, signal.SIGKILL)
        log.wait(StepCommitted, step=steps // 2 + steps // 8, timeout=3600)
        subprocess.run((*holdfast, "scale", "+1", "--address", log.wait(JobStarted).url), check=True)
    except JobTimeoutError:
        return  # the job ended first: its own output says why


if __name__ == "__main__":
    sys.exit(main())
