"""Train a small Llama of Hugging Face transformers.

In a plain loop, with the library's own learning rate schedule.
"""

from __future__ import annotations

import torch
from parts.setting import parse_steps, seed_all
from parts.text import VOCABULARY, LabelledText, read_text
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

import holdfast

CONTEXT = 32


def make_model() -> torch.nn.Module:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    steps = parse_steps(__doc__, 60)
    seed_all(0)
    job = holdfast.init()
    device = job.device
    model = make_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=10, num_training_steps=steps)
    loader = DataLoader(LabelledText(read_text(), CONTEXT), batch_size=4, shuffle=True)
    job.protect(
        model, optimizer, loader, global_batch=12, micro_batch=4, max_grad_norm=1.0, extra={"scheduler": scheduler}
    )
    for step in job.steps(steps):
        for batch in step.micro_batches():
            step.backward(model(**batch).loss)
        if step.apply() and job.rank == 0:
            print(f"step {step.number} loss {step.loss:.9g}", flush=True)


if __name__ == "__main__":
    main()
