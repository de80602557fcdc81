r"""A causal language model from transformers, trained with Accelerate.

    python examples/accelerate_causal_lm.py --offload        # attaches tidegate's plugin; TIDEGATE_* variables count
    python examples/accelerate_causal_lm.py                  # a plain Accelerate script
    TIDEGATE_CONFIG=configs/offload.toml accelerate launch --config_file configs/accelerate_single.yaml \
        -m tidegate.run examples/accelerate_causal_lm.py     # the same plain script, offloaded

With --offload it ends with 0 only if something moved.
"""

from __future__ import annotations

import argparse
import sys

import torch
from accelerate import Accelerator
from corpus import VOCABULARY, StandardLibrary
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM


def options(description: str | None) -> argparse.ArgumentParser:
    """The size of the job."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device-budget", default="0", help="see OffloadConfig")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10, help="optimiser steps")
    return parser


def build(args: argparse.Namespace) -> LlamaForCausalLM:
    """A model with random weights: nothing is downloaded."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=args.width,
        intermediate_size=4 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        max_position_embeddings=args.context,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--offload", action="store_true", help="attach tidegate's plugin")
    args = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=args.accumulate)
    model = build(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    windows = args.steps * args.accumulate * args.batch * accelerator.num_processes
    loader = DataLoader(StandardLibrary(windows, args.context), args.batch)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    session = None
    if args.offload:
        from tidegate.strategies import OffloadPlugin

        session = OffloadPlugin(device_budget=args.device_budget).attach(accelerator, model)

    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                accelerator.print(f"loss {loss.item():.4f}")
            optimizer.step()
            optimizer.zero_grad()

    moved = True
    if session is not None:
        stats = session.stats()
        accelerator.print(stats)
        moved = stats.moved > 0
    accelerator.end_training()
    return 0 if moved else 1


if __name__ == "__main__":
    sys.exit(main())
