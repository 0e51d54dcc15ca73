"""The GPT of examples/moe_gpt.py, each replica over several workers of a node by FSDP2; its experts go their own ways.

    holdfast run --nodes 3 --workers-per-node 2 --expert-slots 6 benchmarks/spread_experts.py --shard 2 --experts 6

Without a load-balancing loss: that would be of each place's part of a micro-batch, not of all of it (docs/layouts.md).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import holdfast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))


def main() -> None:
    """Train as long as the job goes on."""
    from dense_gpt import Bytes, read_text
    from moe_gpt import MoEGPT, loss_of, parse_arguments

    spread = argparse.ArgumentParser(add_help=False)
    spread.add_argument("--shard", type=int, default=1)
    layout, sys.argv[1:] = spread.parse_known_args()
    args = parse_arguments()
    args.aux_loss = 0.0
    torch.manual_seed(args.seed)  # pyright: ignore[reportUnknownMemberType] - torch leaves it untyped
    dataset = Bytes(read_text(args.text), args.context)
    job = holdfast.init(layout=holdfast.Layout(shard=layout.shard))
    model = MoEGPT(args).to(job.device, torch.float64 if args.dtype == "float64" else torch.float32)
    if layout.shard > 1:
        blocks: list[nn.Module] = list(model.blocks)
        experts = {weight for name, weight in model.named_parameters() if ".experts." in name}
        for module in (*blocks, model):
            fully_shard(module, mesh=job.mesh["shard"], ignored_params=experts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    batches = {"global_batch": args.global_batch, "micro_batch": args.micro_batch}
    job.protect(model, optimizer, dataset, **batches, seed=args.seed, max_grad_norm=1.0)
    for step in job.steps(args.steps):
        for batch in step.micro_batches():
            step.backward(loss_of(model, batch, args.dtype))
        step.apply()


if __name__ == "__main__":
    main()
