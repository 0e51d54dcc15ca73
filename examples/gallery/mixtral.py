"""Train a small Mixtral of Hugging Face transformers.

In a plain loop, with gradient accumulation and the auxiliary loss that balances the experts.
"""

from __future__ import annotations

import torch
from parts.setting import parse_steps, seed_all
from parts.text import VOCABULARY, LabelledText, read_text
from torch.utils.data import DataLoader
from transformers import MixtralConfig, MixtralForCausalLM

import holdfast

CONTEXT = 32
ACCUMULATE = 4


def make_model() -> torch.nn.Module:
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=0.01,
        max_position_embeddings=CONTEXT,
        use_cache=False,
    )
    return MixtralForCausalLM(config)


def main() -> None:
    steps = parse_steps(__doc__, 40)
    seed_all(0)
    job = holdfast.init()
    device = job.device
    model = make_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    loader = DataLoader(LabelledText(read_text(), CONTEXT), batch_size=4, shuffle=True)
    job.protect(model, optimizer, loader, global_batch=4 * ACCUMULATE, micro_batch=4, max_grad_norm=1.0)
    for step in job.steps(steps):
        for batch in step.micro_batches():
            loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
            step.backward(loss)
        if step.apply() and job.rank == 0:
            print(f"step {step.number} loss {step.loss:.9g}", flush=True)


if __name__ == "__main__":
    main()
