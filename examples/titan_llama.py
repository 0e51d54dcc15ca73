"""Train the Llama 3 debug model of torchtitan.

Each replica spans several workers of one node.

Runs alone (`python examples/titan_llama.py`), or on several nodes that may fail and join at any time:

    holdfast run --nodes 3 --workers-per-node 2 examples/titan_llama.py --shard 2

It needs torchtitan (pip install 'holdfast[torchtitan]'). Three lines differ from a script of torchtitan: the layout,
the trainer, and the data (docs/torchtitan.md).
"""

from __future__ import annotations

import argparse
import logging
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from dense_gpt import read_text

import holdfast


def debug_config(options: argparse.Namespace) -> Any:
    """Return torchtitan's debug model, optimizer and schedule, with fewer tokens."""
    config: Any = import_module("torchtitan.models.llama3.config_registry").llama3_debugmodel()
    config.training.steps, config.training.global_batch_size = options.steps, options.global_batch
    config.training.local_batch_size, config.training.seq_len = options.local_batch, options.context
    config.parallelism.data_parallel_shard_degree = options.shard
    config.parallelism.tensor_parallel_degree = options.tensor
    config.parallelism.spmd_backend = options.backend
    config.model_spec.model.layers = config.model_spec.model.layers[: options.layers]
    config.validator.enable = False
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--local-batch", type=int, default=2, help="samples of a micro-batch per shard")
    parser.add_argument("--context", type=int, default=64, help="tokens of a sample")
    parser.add_argument("--layers", type=int, default=6, help="layers of the debug model's six to keep")
    parser.add_argument("--shard", type=int, default=1, help="workers of a node that share all parameters (FSDP2)")
    parser.add_argument("--tensor", type=int, default=1, help="workers of a node that share each matrix product")
    parser.add_argument("--backend", default="partial_dtensor", help="torchtitan's parallelism.spmd_backend")
    parser.add_argument("--text", type=Path, help="a file or directory (default: the standard library's source)")
    options = parser.parse_args()
    try:
        from holdfast.integrations.torchtitan import ElasticTrainer, TokenWindows, layout_of, trial_on_cpu

        config = debug_config(options)
    except holdfast.BadInputError as error:  # torchtitan is not installed
        print(f"{parser.prog}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if not torch.cuda.is_available():
        trial_on_cpu(config)

    job = holdfast.init(layout=layout_of(config))
    trainer = ElasticTrainer(config, job)
    text = torch.frombuffer(bytearray(read_text(options.text)), dtype=torch.uint8)
    trainer.train(TokenWindows(text, options.context))
    trainer.close()


if __name__ == "__main__":
    main()
