"""Curves of a run, one JSON object a line: what a script uses where TensorBoard is not installed."""

from __future__ import annotations

import json
from pathlib import Path


class ScalarWriter:
    """Writes scalars as torch.utils.tensorboard's SummaryWriter does, to a file that is begun anew, and prints them."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w")

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Add a point to the curve `tag`."""
        self._file.write(json.dumps({"step": global_step, "tag": tag, "value": scalar_value}) + "\n")
        self._file.flush()
        print(f"step {global_step} {tag} {scalar_value:.9g}", flush=True)
