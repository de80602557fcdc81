"""A plain Accelerate script of 20 optimiser steps; prints its losses and a digest of its final weights as JSON.

Its argument says how many batches make a step.
"""

import hashlib
import json
import sys

import torch
from accelerate import Accelerator
from tests.strategies.causal_lm import Tokens, language_model
from torch.utils.data import DataLoader


def main() -> None:
    every = int(sys.argv[1])
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=every)
    model = language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = Tokens(20 * every * 4 * accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(tokens, batch_size=4))
    torch.manual_seed(3 + accelerator.process_index)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            losses.append(loss.item())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    digest = hashlib.sha256()
    for weight in accelerator.unwrap_model(model).state_dict().values():
        digest.update(weight.numpy().tobytes())
    ranks = accelerator.num_processes
    shown = {"losses": losses, "weights": digest.hexdigest(), "ranks": ranks, "kind": type(model).__name__}
    shown["arguments"] = sys.argv[1:]
    if accelerator.is_main_process:
        print(json.dumps(shown))
    if ranks == 1:  # torch can hang when gloo's process group ends while DDP still holds it, offloaded or not
        accelerator.end_training()


if __name__ == "__main__":
    main()
