"""Train a small byte-level GPT on text.

The text is the source of Python's standard library, or your own (--text).

Runs alone (`python examples/dense_gpt.py`), or on several nodes that may fail and join at any time
(`holdfast run --nodes 4 examples/dense_gpt.py`). Only the lines marked with `# holdfast` are specific to holdfast.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import holdfast

# B batch, T context length, D width, H heads, V vocabulary (all byte values)
VOCABULARY = 256
MAX_TEXT_BYTES = 16 << 20
HALF = ("bfloat16", "float16")


class Bytes(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Consecutive pieces of a text: sample i is (bytes, the bytes that follow each of them)."""

    def __init__(self, text: bytes, context: int) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return max(0, (len(self.text) - 1) // self.context)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        piece = self.text[index * self.context : (index + 1) * self.context + 1].long()
        return piece[:-1], piece[1:]


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to its input."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self.attend(self.norm1(x_BTD))
        return x_BTD + self.down(F.gelu(self.up(self.norm2(x_BTD))))

    def attend(self, x_BTD: torch.Tensor) -> torch.Tensor:
        B, T, D = x_BTD.shape
        qkv = self.qkv(x_BTD).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        y_BHTd = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        return self.out(y_BHTd.transpose(1, 2).reshape(B, T, D))


class GPT(nn.Module):
    """A decoder over bytes."""

    def __init__(self, layers: int, dim: int, heads: int, context: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, dim)
        self.position = nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        self.apply(self.start)

    @staticmethod
    def start(module: nn.Module) -> None:
        """Initialize a module's own parameters with small values."""
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


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], dtype: str = "float32") -> torch.Tensor:
    """Return the mean cross-entropy per byte, in nats; the model computes in `dtype`."""
    inputs_BT, targets_BT = batch
    # bfloat16 and float16: parameters and optimizer stay float32, and so does the loss.
    half = dtype in HALF
    with torch.autocast(inputs_BT.device.type, dtype=getattr(torch, dtype) if half else None, enabled=half):
        logits_BTV = model(inputs_BT)
    return F.cross_entropy((logits_BTV.float() if half else logits_BTV).flatten(0, 1), targets_BT.flatten())


def read_text(path: Path | None) -> bytes:
    """Return a file, all files of a directory, or the top of the Python standard library; at most 16 MiB."""
    root = Path(sysconfig.get_path("stdlib")) if path is None else path
    pattern = "*.py" if path is None else "**/*"
    files = sorted(file for file in root.glob(pattern) if file.is_file()) if root.is_dir() else [root]
    return b"\n".join(file.read_bytes() for file in files)[:MAX_TEXT_BYTES]


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the options of a script that trains this model."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a file or directory (default: the standard library's source)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--global-batch", type=int, default=32, help="samples per step, for any number of workers")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--dtype", choices=["float32", "float64", *HALF], default="float32")
    return parser


def checked(parser: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments, or exit with an error if they are inconsistent."""
    if args.text is not None and not args.text.exists():
        parser.error(f"--text {args.text}: no such file or directory")
    if args.heads < 1 or args.dim % args.heads:
        parser.error(f"--dim is {args.dim} and --heads is {args.heads}: dim must be a multiple of heads")
    return args


def main() -> None:
    parser = argument_parser(__doc__)
    args = checked(parser, parser.parse_args())
    if args.dim % args.heads:
        raise holdfast.BadInputError(
            f"--dim is {args.dim} and --heads is {args.heads}: dim must be a multiple of heads"
        )
    torch.manual_seed(args.seed)  # pyright: ignore[reportUnknownMemberType] - torch leaves it untyped
    dataset = Bytes(read_text(args.text), args.context)

    job = holdfast.init()  # holdfast
    model = GPT(args.layers, args.dim, args.heads, args.context)
    model.to(job.device, torch.float64 if args.dtype == "float64" else torch.float32)
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
