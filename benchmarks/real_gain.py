"""Peak memory and step time of a GPT with its activations on disk, beside the same GPT without, on the CPU.

    python benchmarks/real_gain.py                      # 2048 wide, 4 blocks, fp32
    python benchmarks/real_gain.py --width 768 --batch 16 --json gain.json

Each run is a process of its own, plain and offloaded in turn, so that neither inherits the other's heap. Memory is
the kernel's peak resident set over the measured steps. Time is each side's best round by its median step, chosen on
each side by itself: the best ratio of one pair would only tell which pair was disturbed on its plain side. `spread`
says how far the steps of one process lay apart; above about 1.15 the machine was too busy for the ratio to mean much.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MiB = 2**20


def child(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn

    import tidegate

    width, heads = args.width, args.width // 64

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x_BTD: Tensor) -> Tensor:
            B, T, D = x_BTD.shape
            parts = self.qkv(self.norm1(x_BTD)).chunk(3, dim=-1)
            q, k, v = (part.view(B, T, heads, D // heads).transpose(1, 2) for part in parts)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, D)
            x_BTD = x_BTD + F.dropout(self.out(y), 0.1)
            return x_BTD + F.dropout(self.down(F.gelu(self.up(self.norm2(x_BTD)))), 0.1)

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
            self.blocks = nn.Sequential(*(Block() for _ in range(args.blocks)))

        def forward(self, ids_BT: Tensor) -> Tensor:
            return F.cross_entropy(self.head(self.blocks(self.tokens(ids_BT))).flatten(0, 1), ids_BT.flatten())

    torch.manual_seed(0)
    model, ids_BT = Gpt(), torch.randint(256, (args.batch, args.context))
    losses, seconds = [], []

    def step() -> None:
        started = time.perf_counter()
        loss = model(ids_BT)
        loss.backward()
        losses.append(loss.item())
        for parameter in model.parameters():
            parameter.grad = None
        seconds.append(time.perf_counter() - started)

    with tempfile.TemporaryDirectory(dir=args.path) as spill:
        config = tidegate.OffloadConfig(tiers="disk", device_budget=0, disk_paths=spill)
        session = None if args.child == "plain" else tidegate.attach(model, config)
        step()
        Path("/proc/self/clear_refs").write_text("5")  # the kernel's peak starts anew
        if session is not None:
            session.reset_stats()
        for _ in range(args.steps):
            step()
        status = Path("/proc/self/status").read_text()
        stats = None if session is None else session.stats().to_dict()
        if session is not None:
            session.close()
        left = sorted(path.name for path in Path(spill).iterdir())
    peak = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    return {
        "losses": losses,
        "step": statistics.median(seconds[1:]),
        "spread": max(seconds[1:]) / min(seconds[1:]),
        "peak_rss": peak,
        "stats": stats,
        "left": left,
    }


def run(args: argparse.Namespace, mode: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", mode]
    for name in ("width", "blocks", "batch", "context", "steps", "path"):
        if getattr(args, name) is not None:
            command += [f"--{name}", str(getattr(args, name))]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Runs both modes in turn and compares them. All sizes are bytes, times seconds."""
    rounds = [(run(args, "plain"), run(args, "disk")) for _ in range(args.rounds)]
    plain, disk = (min(side, key=lambda result: result["step"]) for side in zip(*rounds, strict=True))
    ratios = [offloaded["step"] / alone["step"] for alone, offloaded in rounds]
    stats = disk["stats"]
    saved = (stats["written"]["disk"] + stats["kept"]) // args.steps
    return {
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "saved_bytes": saved,
        "plain_step": plain["step"],
        "disk_step": disk["step"],
        "step_ratio": disk["step"] / plain["step"],
        "spread": max(plain["spread"], disk["spread"]),
        "step_ratios": ratios,
        "plain_peak_rss": min(alone["peak_rss"] for alone, _ in rounds),
        "disk_peak_rss": max(offloaded["peak_rss"] for _, offloaded in rounds),
        "written": stats["written"]["disk"],
        "read": stats["read"].get("disk", 0),
        "forwarded": stats["forwarded"].get("disk", 0),
        "dropped": stats["dropped"].get("disk", 0),
        "pending": stats["pending"].get("disk", 0),
        "same_losses": all(alone["losses"] == offloaded["losses"] for alone, offloaded in rounds),
        "left": [name for _, offloaded in rounds for name in offloaded["left"]],
    }


def show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    fall = result["plain_peak_rss"] - result["disk_peak_rss"]
    table = Table("", "plain", "disk", "", title=f"activations on disk, {result['machine']}")
    table.add_row(
        "seconds per step", f"{result['plain_step']:.2f}", f"{result['disk_step']:.2f}", f"{result['step_ratio']:.2f} x"
    )
    table.add_row(
        "peak resident MiB",
        f"{result['plain_peak_rss'] / MiB:.0f}",
        f"{result['disk_peak_rss'] / MiB:.0f}",
        f"-{fall / MiB:.0f}, {fall / result['saved_bytes']:.0%} of the {result['saved_bytes'] / MiB:.0f} saved",
    )
    table.add_row("written, read MiB", "", f"{result['written'] / MiB:.0f}, {result['read'] / MiB:.0f}", "")
    table.add_row("losses", "", "", "same bits" if result["same_losses"] else "DIFFERENT")
    Console().print(table)


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--width", type=int, default=2048)
    options.add_argument("--blocks", type=int, default=4)
    options.add_argument("--batch", type=int, default=4)
    options.add_argument("--context", type=int, default=256)
    options.add_argument("--steps", type=int, default=3)
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument("--path", help="a directory on the disk to measure; default: the temporary directory")
    options.add_argument("--json", type=Path, help="write the figures there")
    options.add_argument("--child", choices=("plain", "disk"), help=argparse.SUPPRESS)
    return options


def main() -> None:
    args = parser().parse_args()
    if args.child:
        print(json.dumps(child(args)))
        return
    result = measure(args)
    show(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
