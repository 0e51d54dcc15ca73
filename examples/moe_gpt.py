"""Train a small GPT with Mixture-of-Experts layers.

It is the byte-level GPT of dense_gpt.py with Mixture-of-Experts layers instead of feed-forward layers.

Runs alone (`python examples/moe_gpt.py`), or on several nodes that may fail and join at any time
(`holdfast run --nodes 4 examples/moe_gpt.py`): the experts are then spread over the nodes, with several copies each.
Only the lines marked with `# holdfast` are specific to holdfast.

With --shard or --tensor, several workers of a node share a replica of all other layers; each of them may hold experts:

    holdfast run --nodes 3 --workers-per-node 2 --expert-slots 6 examples/moe_gpt.py --shard 2
    holdfast run --nodes 3 --workers-per-node 2 --expert-slots 6 examples/moe_gpt.py --tensor 2
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from dense_gpt import HALF, VOCABULARY, Bytes, read_text
from dense_gpt import loss_of as dense_loss
from torch import nn
from torch.nn import functional as F

import holdfast
from holdfast.runtime.moe.gates.routing_trace import RoutingTrace, TraceRouting

# B batch, T context length, D width, H heads


class Block(nn.Module):
    """Attention and a Mixture of Experts, each added to its input."""

    def __init__(self, args: argparse.Namespace, layer: int, routing: TraceRouting | None) -> None:
        super().__init__()
        self.heads = args.heads
        self.norm1, self.norm2 = nn.LayerNorm(args.dim), nn.LayerNorm(args.dim)
        self.qkv, self.out = nn.Linear(args.dim, 3 * args.dim), nn.Linear(args.dim, args.dim)
        self.moe = holdfast.MoE(  # holdfast
            args.dim,
            args.hidden,
            args.experts,
            args.top_k,
            aux_loss=args.aux_loss,
            seed=args.seed,
            layer=layer,
            routing=routing,
            dispatch=args.dispatch,
        )

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self.attend(self.norm1(x_BTD))
        return x_BTD + self.moe(self.norm2(x_BTD))

    def attend(self, x_BTD: torch.Tensor) -> torch.Tensor:
        B, T, D = x_BTD.shape
        qkv = self.qkv(x_BTD).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        y_BHTd = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        return self.out(y_BHTd.transpose(1, 2).reshape(B, T, D))


class MoEGPT(nn.Module):
    """A decoder over bytes."""

    def __init__(self, args: argparse.Namespace, trace: RoutingTrace | None = None) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, args.dim)
        self.position = nn.Embedding(args.context, args.dim)
        self.blocks = nn.ModuleList(Block(args, layer, _routing(args, layer, trace)) for layer in range(args.layers))
        self.norm = nn.LayerNorm(args.dim)
        self.head = nn.Linear(args.dim, VOCABULARY, bias=False)
        self.apply(self._start)

    @staticmethod
    def _start(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        bias = getattr(module, "bias", None)
        if isinstance(module, nn.Linear) and bias is not None:
            nn.init.zeros_(bias)

    def forward(self, bytes_BT: torch.Tensor) -> torch.Tensor:
        places_T = torch.arange(bytes_BT.shape[1], device=bytes_BT.device)
        x_BTD = self.token(bytes_BT) + self.position(places_T)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))

    def aux_loss(self) -> torch.Tensor:
        """Return the load-balancing loss of the last forward pass, summed over the layers."""
        return torch.stack([block.moe.aux_loss for block in self.blocks if isinstance(block, Block)]).sum()


def spread(model: MoEGPT, job: holdfast.Job) -> None:
    """Shard all parameters except the experts: first over `mesh["tensor"]`, then over `mesh["shard"]`.

    With --shard, the load-balancing loss is computed on each local rank's part of a micro-batch.
    """
    from torch.distributed.fsdp import fully_shard  # imports for a second; not needed without a layout
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    blocks = [block for block in model.blocks if isinstance(block, Block)]
    if job.layout.tensor > 1:  # outputs are gathered, because expert layers need complete tokens
        gathered = ColwiseParallel(output_layouts=Replicate())
        for block in blocks:
            parallelize_module(block, job.mesh["tensor"], {"qkv": gathered, "out": gathered})
        parallelize_module(model, job.mesh["tensor"], {"head": gathered})
    if job.layout.shard > 1:
        experts = {weight for block in blocks for weight in block.moe.experts.parameters()}
        for module in (*blocks, model):
            fully_shard(module, mesh=job.mesh["shard"], ignored_params=experts)  # experts are not sharded


def _routing(args: argparse.Namespace, layer: int, trace: RoutingTrace | None) -> TraceRouting | None:
    return trace.layer_routing(layer, args.top_k, seed=args.seed, stride=args.routing_stride) if trace else None


def loss_of(model: MoEGPT, batch: tuple[torch.Tensor, torch.Tensor], dtype: str) -> torch.Tensor:
    """Return the mean cross-entropy per byte, in nats, plus the load-balancing loss.

    In bfloat16 and float16, tokens are sent and computed in half precision.
    """
    return dense_loss(model, batch, dtype) + model.aux_loss()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a file or directory (default: the standard library's source)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=256, help="hidden width of each expert")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2, help="experts that each byte uses")
    parser.add_argument("--aux-loss", type=float, default=0.01, help="coefficient of the load-balancing loss")
    parser.add_argument(
        "--routing-trace", type=Path, help="a .npz of recorded tokens per expert to use instead of the gate's choices"
    )
    parser.add_argument("--routing-stride", type=float, default=1.0, help="recorded iterations per step")
    parser.add_argument(
        "--dispatch",
        choices=["interval", "proportional", "minmax"],
        default="interval",
        help="how tokens are shared among an expert's replicas (docs/dispatch.md)",
    )
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--global-batch", type=int, default=32, help="samples per step, for any number of workers")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--dtype", choices=["float32", "float64", *HALF], default="float32")
    parser.add_argument(
        "--shard", type=int, default=1, help="workers of a node that share all parameters except experts (FSDP2)"
    )
    parser.add_argument("--tensor", type=int, default=1, help="workers of a node that share each matrix product")
    parser.set_defaults(trace=None)
    args = parser.parse_args()
    if args.text is not None and not args.text.exists():
        parser.error(f"--text {args.text}: no such file or directory")
    if args.heads < 1 or args.dim % args.heads:
        parser.error(f"--dim is {args.dim} and --heads is {args.heads}: dim must be a multiple of heads")
    if not 1 <= args.top_k <= args.experts:
        parser.error(f"--top-k is {args.top_k} and --experts is {args.experts}: top-k must be 1 to experts")
    if not 0 < args.routing_stride < float("inf"):
        parser.error(f"--routing-stride is {args.routing_stride}: it must be above 0")
    if args.routing_trace is not None:
        try:
            args.trace = RoutingTrace.read(args.routing_trace)
            args.trace.check_model(args.layers, args.experts)
        except holdfast.BadInputError as error:
            parser.error(f"--routing-trace: {error}")
    return args


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)  # pyright: ignore[reportUnknownMemberType] - torch leaves it untyped
    dataset = Bytes(read_text(args.text), args.context)

    layout = holdfast.Layout(shard=args.shard, tensor=args.tensor)
    job = holdfast.init(layout=layout if layout.places > 1 else None)  # holdfast
    model = MoEGPT(args, args.trace).to(job.device, torch.float64 if args.dtype == "float64" else torch.float32)
    if layout.places > 1:
        spread(model, job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    batches = {"global_batch": args.global_batch, "micro_batch": args.micro_batch}
    scaler = torch.amp.GradScaler(job.device.type, enabled=args.dtype == "float16")
    job.protect(model, optimizer, dataset, **batches, seed=args.seed, max_grad_norm=1.0, scaler=scaler)  # holdfast
    started = time.monotonic()
    for step in job.steps(args.steps):  # holdfast
        for batch in step.micro_batches():  # holdfast
            step.backward(loss_of(model, batch, args.dtype))  # holdfast
        if step.apply() and job.rank == 0 and (step.number % 10 == 0 or step.number == args.steps):  # holdfast
            taken = time.monotonic() - started
            print(f"step {step.number:5d}  loss {step.loss:.4f}  workers {job.world_size}  {taken:7.1f} s", flush=True)


if __name__ == "__main__":
    main()
