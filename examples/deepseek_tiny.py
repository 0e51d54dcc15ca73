"""Train a tiny DeepSeek-V3 of Hugging Face transformers.

The weights are random, the text is real, and tokens are bytes.

Runs alone (`python examples/deepseek_tiny.py`), or on several nodes that may fail and join at any time
(`holdfast run --nodes 4 examples/deepseek_tiny.py`): its experts are then spread over the nodes, with several copies
each. Everything else is the library's own model. Only the lines marked with `# holdfast` are specific to holdfast.
It needs the extra `transformers`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from dense_gpt import VOCABULARY, Bytes, read_text
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

import holdfast
from holdfast.integrations.transformers import elastic_experts, plain_experts

# B batch, T context length


def make_model(args: argparse.Namespace) -> torch.nn.Module:
    """Return a DeepSeek-V3 with all parts of the real one, but few of each; its first layer has no experts."""
    config: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": args.dim,
        "intermediate_size": 2 * args.dim,
        "moe_intermediate_size": args.dim,
        "num_hidden_layers": args.layers,
        "first_k_dense_replace": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": args.experts,
        "num_experts_per_tok": 2,
        "n_group": args.experts // 2,
        "topk_group": min(2, args.experts // 2),
        "n_shared_experts": 1,
        "max_position_embeddings": args.context,
        "bos_token_id": None,
        "eos_token_id": None,
        "use_cache": False,
    }
    return DeepseekV3ForCausalLM(DeepseekV3Config(**config))


def loss_of(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the mean cross-entropy per byte, in nats."""
    inputs_BT, targets_BT = batch
    logits: torch.Tensor = model(input_ids=inputs_BT).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets_BT.flatten())


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a file or directory (default: the standard library's source)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--bias-rate", type=float, default=1e-3, help="change of the balancing bias per step")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--global-batch", type=int, default=32, help="samples per step, for any number of workers")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument(
        "--save",
        type=Path,
        help="write the trained model to this folder, as transformers do; only without holdfast run",
    )
    args = parser.parse_args()
    if args.text is not None and not args.text.exists():
        parser.error(f"--text {args.text}: no such file or directory")
    if args.experts < 2 or args.experts % 2:
        parser.error(f"--experts is {args.experts}: give an even number, they form groups of two")
    return args


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)  # pyright: ignore[reportUnknownMemberType] - torch leaves it untyped
    dataset = Bytes(read_text(args.text), args.context)

    job = holdfast.init()  # holdfast
    model = elastic_experts(make_model(args), bias_rate=args.bias_rate)  # holdfast
    model.train().to(job.device, torch.float64 if args.dtype == "float64" else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    batches = {"global_batch": args.global_batch, "micro_batch": args.micro_batch}
    job.protect(model, optimizer, dataset, **batches, seed=args.seed, max_grad_norm=1.0)  # holdfast
    started = time.monotonic()
    for step in job.steps(args.steps):  # holdfast
        for batch in step.micro_batches():  # holdfast
            step.backward(loss_of(model, batch))  # holdfast
        if step.apply() and job.rank == 0 and (step.number % 10 == 0 or step.number == args.steps):  # holdfast
            taken = time.monotonic() - started
            print(f"step {step.number:5d}  loss {step.loss:.4f}  workers {job.world_size}  {taken:7.1f} s", flush=True)
    if args.save is not None:
        plain: Any = plain_experts(model)  # holdfast
        plain.save_pretrained(args.save)


if __name__ == "__main__":
    main()
