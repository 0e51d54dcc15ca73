"""Run a plain training script in one process, with its DataLoader shuffled in holdfast's sample order.

    python benchmarks/in_order.py examples/gallery/llama_plain.py --steps 60

Nothing else of the script changes, so its losses can be compared with those of the resilient script.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import RandomSampler

from holdfast.runtime.data.sampling import SampleOrder

#: The default seed of `job.protect`.
SEED = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")
    options = parser.parse_args()
    RandomSampler.__iter__ = iterate_in_order
    sys.path[0] = str(Path(options.script).resolve().parent)
    sys.argv = [options.script, *options.args]
    runpy.run_path(options.script, run_name="__main__")


def iterate_in_order(self: RandomSampler) -> Iterator[int]:
    """Yield the indices of a sampler's data set in the order of holdfast's first pass over it."""
    source: Any = self.data_source
    order = SampleOrder(seed=SEED, length=len(source), global_batch=1, micro_batch=1)
    return map(order.sample_at, range(len(source)))


if __name__ == "__main__":
    main()
