"""Train a small Llama of Hugging Face transformers.

In a plain loop, with the library's own learning rate schedule.
"""

from __future__ import annotations

from itertools import islice

import torch
from parts.setting import parse_steps, seed_all
from parts.text import VOCABULARY, LabelledText, read_text
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

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
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = make_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=10, num_training_steps=steps)
    loader = DataLoader(LabelledText(read_text(), CONTEXT), batch_size=12, shuffle=True)
    for number, batch in enumerate(islice(loader, steps), start=1):
        loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()  # pyright: ignore[reportUnknownMemberType]
        scheduler.step()
        optimizer.zero_grad()
        print(f"step {number} loss {loss.item():.9g}", flush=True)


if __name__ == "__main__":
    main()
