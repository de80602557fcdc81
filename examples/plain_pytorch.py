"""A training loop of one's own, with and without offload.

    python examples/plain_pytorch.py                         # everything eligible goes to disk, beside a plain run
    python examples/plain_pytorch.py --width 1024 --layers 8 --tiers host disk --device cuda

Ends with 0 only if the losses of both runs have the same bits and something moved.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
import torch.nn.functional as F
from corpus import VOCABULARY, StandardLibrary
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader

import tidegate


class CausalLM(nn.Module):
    """A small transformer over bytes."""

    mask: Tensor

    def __init__(self, width: int = 256, layers: int = 4, heads: int = 4, context: int = 128) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context))

    def forward(self, ids_BT: Tensor) -> Tensor:
        T = ids_BT.shape[1]
        x_BTD = self.tokens(ids_BT) + self.positions.weight[:T]
        return self.head(self.blocks(x_BTD, mask=self.mask[:T, :T], is_causal=True))

    def loss(self, ids_BT: Tensor) -> Tensor:
        logits_BTV = self(ids_BT[:, :-1])
        return F.cross_entropy(logits_BTV.flatten(0, 1), ids_BT[:, 1:].flatten())


def train(args: argparse.Namespace, config: tidegate.OffloadConfig | None) -> tuple[list[float], float, str]:
    torch.manual_seed(0)
    model = CausalLM(args.width, args.layers, args.heads, args.context).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    loader = DataLoader(StandardLibrary(args.steps * args.batch, args.context + 1), args.batch)
    session = None if config is None else tidegate.attach(model, config)
    losses, started = [], time.perf_counter()
    for batch in loader:
        ids_BT = batch["input_ids"].to(args.device)
        if session is None:
            loss = model.loss(ids_BT)
        else:
            with session.step():  # the loss is part of the step too
                loss = model.loss(ids_BT)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    seconds = (time.perf_counter() - started) / len(losses)
    if session is None:
        return losses, seconds, "nothing moves without a session"
    with session:
        stats = session.stats()
    return losses, seconds, str(stats) if stats.moved else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tiers", nargs="+", default=["disk"], choices=["host", "disk"])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()

    plain, plain_seconds, _ = train(args, None)
    config = tidegate.OffloadConfig(tiers=args.tiers, device_budget=0)
    offloaded, seconds, moved = train(args, config)

    table = Table("", "plain", "offloaded")
    for step in range(0, args.steps, max(1, args.steps // 5)):
        table.add_row(f"loss of step {step + 1}", f"{plain[step]:.6f}", f"{offloaded[step]:.6f}")
    table.add_row("seconds per step", f"{plain_seconds:.3f}", f"{seconds:.3f}")
    console = Console()
    console.print(table)
    console.print(moved or "nothing moved", soft_wrap=True)
    if plain != offloaded:
        console.print("[red]the losses differ[/red]")
    return 0 if moved and plain == offloaded else 1


if __name__ == "__main__":
    sys.exit(main())
