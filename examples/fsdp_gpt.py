"""Train a small GPT with FSDP2 or tensor parallelism.

Each replica spans several workers of one node, with FSDP2, tensor parallelism, or both.

Runs alone (`python examples/fsdp_gpt.py`), or on several nodes that may fail and join at any time:

    holdfast run --nodes 3 --workers-per-node 2 examples/fsdp_gpt.py --shard 2
    holdfast run --nodes 2 --workers-per-node 4 examples/fsdp_gpt.py --shard 2 --tensor 2
    holdfast run --nodes 3 --workers-per-node 4 examples/fsdp_gpt.py --shard 4 --shard-from 3:2

With --shard-from NODES:SHARD the layout changes while the job runs. In the last command, two workers share a replica
with three nodes or more, and four workers with fewer.

The loop is the same as in dense_gpt.py. Only the layout and torch's calls that shard the model are new.
"""

from __future__ import annotations

import time

import torch
from dense_gpt import GPT, Bytes, argument_parser, checked, loss_of, read_text
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import holdfast


def spread(model: GPT, mesh: DeviceMesh, *, shard: int, tensor: int) -> None:
    """Shard the feed-forward layers over `mesh["tensor"]`, and all resulting parameters over `mesh["shard"]`."""
    blocks: list[nn.Module] = list(model.blocks)
    if tensor > 1:
        for block in blocks:
            parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if shard > 1:
        for module in (*blocks, model):
            fully_shard(module, mesh=mesh["shard"])


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--shard", type=int, default=1, help="workers of a node that share all parameters (FSDP2)")
    parser.add_argument(
        "--shard-from",
        action="append",
        default=[],
        metavar="NODES:SHARD",
        help="use another --shard from this number of nodes on",
    )
    parser.add_argument("--tensor", type=int, default=1, help="workers of a node that share each matrix product")
    args = checked(parser, parser.parse_args())
    torch.manual_seed(args.seed)  # pyright: ignore[reportUnknownMemberType] - torch leaves it untyped
    dataset = Bytes(read_text(args.text), args.context)

    # Keys are the smallest number of nodes for a layout. A fixed layout would be `layout=holdfast.Layout(...)`.
    layouts = {1: holdfast.Layout(shard=args.shard, tensor=args.tensor)}
    for nodes, shard in (map(int, pair.split(":")) for pair in args.shard_from):
        layouts[nodes] = holdfast.Layout(shard=shard, tensor=args.tensor)
    job = holdfast.init(layout=layouts)  # holdfast
    with torch.device("meta"):  # no memory is allocated: no worker ever holds the full model
        model = GPT(args.layers, args.dim, args.heads, args.context)
    spread(model, job.mesh, shard=job.layout.shard, tensor=job.layout.tensor)
    job.materialize(model, GPT.start)  # holdfast: initialized as by GPT()
    model.to(torch.float64 if args.dtype == "float64" else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    batches = {"global_batch": args.global_batch, "micro_batch": args.micro_batch}
    job.protect(model, optimizer, dataset, **batches, seed=args.seed, max_grad_norm=1.0)  # holdfast
    started = time.monotonic()
    for step in job.steps(args.steps):  # holdfast
        for batch in step.micro_batches():  # holdfast
            step.backward(loss_of(model, batch, args.dtype))  # holdfast
        if step.apply() and job.rank == 0 and (step.number % 10 == 0 or step.number == args.steps):  # holdfast
            taken = time.monotonic() - started
            print(f"step {step.number:5d}  loss {step.loss:.4f}  workers {job.world_size}  {taken:7.1f} s", flush=True)


if __name__ == "__main__":
    main()
