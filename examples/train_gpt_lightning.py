"""Trains a small GPT twice, plainly and with every eligible activation on disk, and compares the two runs.

    python examples/train_gpt_lightning.py                 # about 10 M parameters on the standard library's source
    python examples/train_gpt_lightning.py --help

Ends with 0 only if the losses of every step are bit-identical, something was offloaded, and the disk is clean.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from corpus import VOCABULARY, StandardLibrary
from lightning.pytorch.callbacks import Callback, RichProgressBar
from lightning.pytorch.strategies import Strategy
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader

import tidegate
from tidegate.strategies import OffloadStrategy


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + F.dropout(self.attend(self.attention_norm(x_BTD)), self.dropout, self.training)
        hidden = F.gelu(self.mlp_in(self.mlp_norm(x_BTD)))
        return x_BTD + F.dropout(self.mlp_out(hidden), self.dropout, self.training)

    def attend(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        q, k, v = (y.view(B, T, self.heads, D // self.heads).transpose(1, 2) for y in self.qkv(x_BTD).chunk(3, dim=-1))
        dropout = self.dropout if self.training else 0.0
        y_BHTd = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.attention_out(y_BHTd.transpose(1, 2).reshape(B, T, D))


class GPT(L.LightningModule):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args = args
        self.tokens = nn.Embedding(VOCABULARY, args.width)
        self.positions = nn.Embedding(args.context, args.width)
        self.blocks = nn.ModuleList(Block(args.width, args.heads, args.dropout) for _ in range(args.blocks))
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, VOCABULARY, bias=False)

    def forward(self, ids_BT: Tensor) -> Tensor:
        x_BTD = self.tokens(ids_BT) + self.positions.weight[: ids_BT.shape[1]]
        x_BTD = F.dropout(x_BTD, self.args.dropout, self.training)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        ids_BT = batch["input_ids"]
        logits_BTV = self(ids_BT[:, :-1])
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), ids_BT[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.args.learning_rate)


@dataclass
class Run:
    """What one training run showed."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    spill_dirs: tuple[Path, ...] = ()
    peak_activations: int = 0
    peak_allocated: int = 0
    min_bytes: int = 0
    stats: tidegate.OffloadStats | None = None

    @property
    def seconds_per_step(self) -> float:
        return statistics.median(self.seconds)


class Recorder(Callback):
    """Notes loss and time of every step, and where the run spills to."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.started = 0.0

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        self.started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.run.losses.append(outputs["loss"].item())
        self.run.seconds.append(time.perf_counter() - self.started)
        if isinstance(trainer.strategy, OffloadStrategy) and trainer.strategy.session is not None:
            self.run.spill_dirs = trainer.strategy.session.spill_dirs


def train(args: argparse.Namespace, strategy: Strategy | str) -> Run:
    L.seed_everything(args.seed, verbose=False)
    run = Run()
    trainer = L.Trainer(
        strategy=strategy,
        accelerator=args.accelerator,
        devices=1,
        max_epochs=1,
        deterministic=args.on_gpu,
        callbacks=[Recorder(run), RichProgressBar()],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    if args.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    trainer.fit(GPT(args), batches(args))
    if args.on_gpu:
        run.peak_allocated = torch.cuda.max_memory_allocated()
    if isinstance(trainer.strategy, OffloadStrategy):
        run.stats = trainer.strategy.offload_stats
        run.min_bytes = int(trainer.strategy.offload.min_bytes)
    return run


def batches(args: argparse.Namespace) -> DataLoader[dict[str, Tensor]]:
    return DataLoader(StandardLibrary(args.steps * args.batch, args.context + 1), batch_size=args.batch)


def saved_storages(args: argparse.Namespace) -> list[int]:
    """Bytes of each storage that autograd holds between a plain forward and its backward, weights left out."""
    L.seed_everything(args.seed, verbose=False)
    device = "cuda" if args.on_gpu else "cpu"
    model = GPT(args).to(device)
    model.log = lambda *_, **__: None  # there is no Trainer to log to
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    saved: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        batch = {name: ids.to(device) for name, ids in next(iter(batches(args))).items()}
        loss = model.training_step(batch, 0)
    sizes = list(saved.values())
    del loss  # until here the graph kept every storage alive, so no address was used twice
    return sizes


def report(args: argparse.Namespace, plain: Run, offloaded: Run, console: Console) -> list[str]:
    """Prints the two runs side by side; returns what is wrong with them."""
    stats = offloaded.stats
    if stats is None:
        return ["the offloaded run has no statistics"]
    table = Table(
        title=f"{args.steps} steps, plain beside offloaded",
        caption="Peak activation bytes, plain: all storages that autograd saves in one step, counted; offloaded: the "
        "measured peak of eligible ones in memory, and those too small to move. GB/s: mean over the whole run.",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column()
    table.add_column("plain", justify="right")
    table.add_column("offloaded", justify="right")
    table.add_column()

    for step in tenths(min(len(plain.losses), len(offloaded.losses))):
        before, after = plain.losses[step - 1], offloaded.losses[step - 1]
        table.add_row(
            f"loss at step {step}", f"{before:.7f}", f"{after:.7f}", "same bits" if before == after else "DIFFERS"
        )
    table.add_section()
    table.add_row("peak activation bytes", mib(plain.peak_activations), mib(offloaded.peak_activations))
    if args.on_gpu:
        table.add_row("peak allocated on the GPU", mib(plain.peak_allocated), mib(offloaded.peak_allocated))
    table.add_row("seconds per step", f"{plain.seconds_per_step:.3f}", f"{offloaded.seconds_per_step:.3f}", "median")
    table.add_section()
    duration = sum(offloaded.seconds)
    for tier in stats.written:
        for verb, moved in (("written", stats.written), ("read", stats.read)):
            nbytes = moved.get(tier, 0)
            rate = f"{nbytes / duration / 1e9:.2f} GB/s, {stats.modes.get(tier, '')}"
            table.add_row(f"{tier}: {verb}", "-", mib(nbytes), rate)
        table.add_row(f"{tier}: not waited for", "-", mib(stats.forwarded.get(tier, 0)), "taken while still in memory")
    left = [path for path in offloaded.spill_dirs if path.exists()]
    table.add_row("spill directory", "-", "NOT EMPTY" if left else "empty", ", ".join(map(str, offloaded.spill_dirs)))
    console.print(table)
    return problems(plain, offloaded, stats, left)


def problems(plain: Run, offloaded: Run, stats: tidegate.OffloadStats, left: list[Path]) -> list[str]:
    found = differing_losses(plain, offloaded)
    if not stats.moved:
        found.append("nothing was offloaded")
    if left:
        found.append(f"left on disk: {', '.join(map(str, left))}")
    return found


def differing_losses(plain: Run, offloaded: Run) -> list[str]:
    if len(plain.losses) != len(offloaded.losses):
        return [f"the plain run has {len(plain.losses)} steps, the offloaded one {len(offloaded.losses)}"]
    for step, (before, after) in enumerate(zip(plain.losses, offloaded.losses, strict=True), 1):
        if not math.isfinite(before):
            return [f"losses are not finite from step {step} on"]
        if before != after:
            return [f"losses differ from step {step} on"]
    return []


def tenths(steps: int) -> list[int]:
    return sorted({max(1, round(steps * tenth / 10)) for tenth in range(1, 11)})


def mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=128, help="tokens (bytes) per sequence")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--accelerator", default="auto", help="as in lightning.Trainer")
    parser.add_argument("--spill-dir", help="folder on the disk to use; default: the temporary directory")
    parser.add_argument(
        "--from-environment", action="store_true", help='use Trainer(strategy="tidegate") and TIDEGATE_* variables'
    )
    args = parser.parse_args()
    args.on_gpu = args.accelerator != "cpu" and torch.cuda.is_available()
    return args


def main() -> int:
    args = parse_args()
    console = Console()
    if args.from_environment:
        strategy: Strategy | str = "tidegate"
    else:
        disk_paths = (args.spill_dir,) if args.spill_dir else ()
        strategy = OffloadStrategy(
            offload=tidegate.OffloadConfig(tiers=("disk",), device_budget=0, disk_paths=disk_paths)
        )

    parameters = sum(weight.numel() for weight in GPT(args).parameters())
    console.print(f"GPT of {parameters / 1e6:.1f} M parameters; first a plain run, then one with offload.")
    plain = train(args, "auto")
    offloaded = train(args, strategy)

    saved = saved_storages(args)
    plain.peak_activations = sum(saved)
    if offloaded.stats is not None:
        too_small = sum(nbytes for nbytes in saved if nbytes < offloaded.min_bytes)
        offloaded.peak_activations = offloaded.stats.peak_resident + too_small

    found = report(args, plain, offloaded, console)
    for problem in found:
        console.print(f"[red]FAILED[/red]: {problem}")
    if not found:
        console.print("Every loss is the plain run's, bit for bit.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
