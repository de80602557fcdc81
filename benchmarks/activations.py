r"""What it costs to hold fewer activations on one GPU: tidegate beside checkpointing and other ways to offload.

    python benchmarks/activations.py --preset 8192 --json out.json
    python benchmarks/activations.py --model gpt --hidden 8192 --layers 4 --batch 16 --sequence 1024 \
        --modes keep trl host-free host-everything

All modes run one after the other in one process over the same model. A step is a forward and a backward; its time is
the median over the timed steps, by device events. Raw copy and disk rates are measured in the same run.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import logging
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for --exact; read when CUDA starts

import torch
from activation_models import MODELS, Stack, build
from disk_tier import CHUNK, Raw
from rich.console import Console
from rich.table import Table
from torch import Tensor

import tidegate
from tidegate.memory.pinned import Slab

GiB = 2**30
MODES = (
    "keep",
    "checkpoint",
    "trl",
    "save-on-cpu",
    "compile-0.5",
    "compile-0.2",
    "host-free",
    "host-everything",
    "disk-free",
    "disk-everything",
    "cascade-everything",
)
PRESETS: dict[str, dict[str, Any]] = {
    "8192": {
        "hidden": 8192,
        "layers": 4,
        "batch": 16,
        "sequence": 1024,
        "modes": ["keep", "checkpoint", "trl", "host-free", "host-everything"],
    },
    "4096": {
        "hidden": 4096,
        "layers": 8,
        "batch": 16,
        "sequence": 2048,
        "modes": ["keep", "checkpoint", "trl", "host-free", "host-everything"],
    },
    "disk": {
        "hidden": 8192,
        "layers": 8,
        "batch": 2,
        "sequence": 1024,
        "modes": ["keep", "disk-free", "disk-everything"],
        "steps": 5,
    },
}
for _model in ("bert", "t5"):
    PRESETS[_model] = PRESETS["8192"] | {"model": _model, "modes": ["keep", "host-free"]}


class Clock:
    """Seconds on the device, or on the host where there is no GPU."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def stamp(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1e3 if self.cuda else end - start

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


@dataclass
class Row:
    """Figures of one mode. Seconds are medians of a step; bytes are of a step."""

    mode: str
    step: float = math.nan
    fastest: float = math.nan
    slowest: float = math.nan
    forward: float = math.nan
    backward: float = math.nan
    after_forward: int | None = None
    peak: int | None = None
    retries: int | None = None
    written: dict[str, float] = field(default_factory=dict)
    read: dict[str, float] = field(default_factory=dict)
    forwarded: dict[str, float] = field(default_factory=dict)
    pinned: int = 0
    pinned_asked: int = 0
    stall: float = 0.0
    tiers: dict[str, str] = field(default_factory=dict)
    derived: dict[str, float] = field(default_factory=dict)
    trace: dict[str, Any] = field(default_factory=dict)
    loss: float = math.nan
    error: str = ""


# Modes


@dataclass
class Running:
    """A mode that is set up: how to run a forward, and the session if there is one."""

    forward: Callable[[Tensor], Tensor]
    session: tidegate.OffloadSession | None = None


def offload_config(mode: str, args: argparse.Namespace) -> tidegate.OffloadConfig:
    place, amount = mode.split("-")
    tiers = {"host": ("host",), "disk": ("disk",), "cascade": ("host", "disk")}[place]
    options: dict[str, Any] = {"tiers": tiers, "device_budget": "free" if amount == "free" else 0}
    if "disk" in tiers:
        options["disk_paths"] = tuple(args.disk_path)
    for name in ("window", "host_budget", "disk_budget", "min_bytes", "io_threads"):
        if getattr(args, name) is not None:
            options[name] = getattr(args, name)
    if place == "disk" and amount == "everything" and args.window is None:
        options["window"] = "256MiB"  # the tail that stays in flight is small beside what a slow disk takes
    return tidegate.OffloadConfig(verify=args.verify, **options)


@contextmanager
def running(mode: str, model: Stack, args: argparse.Namespace) -> Iterator[Running]:
    """Sets a mode up and takes it down again."""
    if mode == "keep":
        yield Running(model)
    elif mode == "checkpoint":
        model.checkpointed = True
        try:
            yield Running(model)
        finally:
            model.checkpointed = False
    elif mode == "save-on-cpu":
        pin = next(model.parameters()).is_cuda
        yield Running(inside(lambda: torch.autograd.graph.save_on_cpu(pin_memory=pin), model))
    elif mode == "trl":
        offloading = trl_manager(model)
        yield Running(inside(lambda: offloading, model))
    elif mode.startswith("compile-"):
        import torch._functorch.config as functorch_config

        torch._dynamo.reset()
        with functorch_config.patch(activation_memory_budget=float(mode.removeprefix("compile-"))):
            yield Running(torch.compile(model))
        torch._dynamo.reset()
    else:
        with tidegate.attach(model, offload_config(mode, args)) as session:
            yield Running(model, session)


def inside(manager: Callable[[], AbstractContextManager[Any]], model: Stack) -> Callable[[Tensor], Tensor]:
    def forward(x_BTD: Tensor) -> Tensor:
        with manager():
            y_BTD: Tensor = model(x_BTD)
        return y_BTD

    return forward


def trl_manager(model: Stack) -> AbstractContextManager[Any]:
    """TRL's offloading as its trainers set it up."""
    from accelerate import PartialState

    PartialState()  # its logger needs it
    make = importlib.import_module("trl.models.activation_offloading").get_act_offloading_ctx_manager
    manager: AbstractContextManager[Any] = make(model, use_pin_memory=True, use_streams=True, warn_if_no_head=False)
    return manager


# Measuring


def measure(mode: str, model: Stack, inputs: tuple[Tensor, Tensor], args: argparse.Namespace) -> Row:
    row, clock = Row(mode), Clock(inputs[0].device)
    settle(model)
    try:
        with running(mode, model, args) as run:
            warm_up = (
                args.warm_up if args.warm_up is not None else {"free": 10, "everything": 2}.get(mode.split("-")[-1], 4)
            )
            for _ in range(warm_up):
                step(run, model, inputs, clock)
            if run.session is not None:
                run.session.reset_stats()
            before = retries = 0
            if clock.cuda:
                torch.cuda.reset_peak_memory_stats()
                before, retries = torch.cuda.memory_allocated(), torch.cuda.memory_stats()["num_alloc_retries"]
            steps = [step(run, model, inputs, clock) for _ in range(args.steps)]
            if clock.cuda:
                row.peak = torch.cuda.max_memory_allocated() - before
                row.retries = torch.cuda.memory_stats()["num_alloc_retries"] - retries
            fill(row, steps, run.session, args.steps)
            if mode == "disk-everything" and run.session is not None:
                row.derived |= paced(run, run.session, model, inputs, clock)
            if args.trace:
                row.trace = traced(run, model, inputs, clock, Path(args.trace) / f"{mode}.json")
    except (RuntimeError, ImportError, OSError, tidegate.TidegateError) as error:
        row.error = f"{type(error).__name__}: {error}"[:300]
    settle(model)
    return row


def step(run: Running, model: Stack, inputs: tuple[Tensor, Tensor], clock: Clock) -> tuple[float, float, int, float]:
    """Runs one step; seconds of its forward and backward, bytes after forward, and the loss."""
    x_BTD, gradient_BTD = inputs
    for parameter in model.parameters():
        parameter.grad = None
    clock.synchronize()
    before = torch.cuda.memory_allocated() if clock.cuda else 0
    start = clock.stamp()
    y_BTD = run.forward(x_BTD)
    turn = clock.stamp()
    after = torch.cuda.memory_allocated() - before if clock.cuda else 0
    y_BTD.backward(gradient_BTD)
    end = clock.stamp()
    clock.synchronize()
    return clock.seconds(start, turn), clock.seconds(turn, end), after, float(y_BTD.detach().float().square().mean())


def paced(
    run: Running, session: tidegate.OffloadSession, model: Stack, inputs: tuple[Tensor, Tensor], clock: Clock
) -> dict[str, float]:
    """Bytes a second of writing alone, until the last byte of a forward is stored, and of reading alone."""
    rates: dict[str, list[float]] = {"write": [], "read": []}
    for _ in range(3):
        settle(model)
        session.reset_stats()
        started = time.perf_counter()
        y_BTD = run.forward(inputs[0])
        written = sum(session.stats().written.values())  # waits for the writes
        turned = time.perf_counter()
        y_BTD.backward(inputs[1])
        clock.synchronize()
        ended = time.perf_counter()
        rates["write"].append(written / (turned - started))
        rates["read"].append(sum(session.stats().read.values()) / (ended - turned))
    return {f"{name} bytes a second": statistics.median(some) for name, some in rates.items()}


def fill(row: Row, steps: list[tuple[float, float, int, float]], session: Any, count: int) -> None:
    totals = [forward + backward for forward, backward, _, _ in steps]
    row.step, row.fastest, row.slowest = statistics.median(totals), min(totals), max(totals)
    row.forward, row.backward = (statistics.median(one[index] for one in steps) for index in (0, 1))
    row.after_forward = steps[-1][2] or None
    row.loss = steps[-1][3]
    if session is None:
        return
    stats = session.stats()
    for name in ("written", "read", "forwarded"):
        setattr(row, name, {tier: nbytes / count for tier, nbytes in getattr(stats, name).items()})
    row.pinned, row.pinned_asked, row.stall = stats.pinned, stats.pinned_asked, stats.stall_seconds / count
    row.tiers = dict(stats.modes)


def settle(model: Stack) -> None:
    for parameter in model.parameters():
        parameter.grad = None
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def traced(run: Running, model: Stack, inputs: tuple[Tensor, Tensor], clock: Clock, path: Path) -> dict[str, Any]:
    """Where one step's time goes: how long the device computes, copies and waits, and what the host waits for."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
        step(run, model, inputs, clock)
    path.parent.mkdir(parents=True, exist_ok=True)
    spans: dict[str, list[tuple[float, float]]] = {"kernels": [], "to host": [], "to device": []}
    waits: dict[str, int] = {}
    for event in profiler.events() or ():
        if event.device_type.name == "CUDA":
            kind = "to host" if "DtoH" in event.name else "to device" if "HtoD" in event.name else "kernels"
            spans[kind].append((event.time_range.start, event.time_range.end))
        elif "Synchronize" in event.name:
            waits[event.name] = waits.get(event.name, 0) + 1
    found = [span for some in spans.values() for span in some]
    if not found:
        return {"host waits": waits}
    begin, end = min(start for start, _ in found), max(end for _, end in found)
    summary: dict[str, Any] = {"span ms": (end - begin) / 1e3, "host waits": waits}
    for kind, some in spans.items():
        summary[f"{kind} ms"] = sum(stop - start for start, stop in united(some)) / 1e3
    busy = united(spans["kernels"])
    idle = [(start - stop) / 1e3 for (_, stop), (start, _) in pairwise(busy)]
    summary["kernels idle ms"], summary["longest idle ms"] = sum(idle), max(idle, default=0.0)
    path.write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def united(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return joined


# Physical limits


def link_rates(device: torch.device, nbytes: int = GiB) -> dict[str, float]:
    """Bytes a second of pinned copies: out, back, and each while both run."""
    pinned = [Slab(nbytes, pin=True).tensor for _ in range(2)]
    blocks = [torch.randint(256, (nbytes,), dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device), torch.cuda.Stream(device)]

    def rate(out: bool, back: bool) -> float:
        torch.cuda.synchronize()
        start, ends = torch.cuda.Event(enable_timing=True), []
        start.record()
        for stream, wanted, (target, source) in zip(
            streams, (out, back), ((pinned[0], blocks[0]), (blocks[1], pinned[1])), strict=True
        ):
            stream.wait_event(start)
            with torch.cuda.stream(stream):
                for _ in range(3 * wanted):
                    target.copy_(source, non_blocking=True)
                end = torch.cuda.Event(enable_timing=True)
                end.record()
                ends.append(end)
        torch.cuda.synchronize()
        return 3e3 * nbytes / max(float(start.elapsed_time(end)) for end in ends)

    pinned[1].copy_(blocks[1])
    rate(True, True)
    return {
        name: statistics.median(rate(out, back) for _ in range(5))
        for name, out, back in (("out", True, False), ("back", False, True), ("both", True, True))
    }


def disk_rates(paths: list[str], total: int, threads: int) -> dict[str, float]:
    """Bytes a second of a bare O_DIRECT loop over one file in each path at once: write, then read."""
    import mmap
    from concurrent.futures import ThreadPoolExecutor

    total = total // CHUNK * CHUNK
    memory = mmap.mmap(-1, CHUNK)
    memory.write(os.urandom(CHUNK))
    view = memoryview(memory)
    raws = [Raw(path, total, threads) for path in paths]
    rates: dict[str, list[float]] = {"write": [], "read": []}
    try:
        with ThreadPoolExecutor(len(raws)) as pool:
            for turn in range(4):
                for name in rates:
                    started = time.perf_counter()
                    list(pool.map(lambda raw, name=name: getattr(raw, name)(view, CHUNK, total), raws))
                    if turn:  # the first pass turns allocated blocks into written ones
                        rates[name].append(len(raws) * total / (time.perf_counter() - started))
    finally:
        for raw in raws:
            raw.pool.shutdown()
            os.close(raw.fd)
    return {name: statistics.median(some) for name, some in rates.items()}


def derive(rows: list[Row], link: dict[str, float], disk: dict[str, float]) -> None:
    """Ratios between the modes, and of what was moved to what could have been."""
    by_mode = {row.mode: row for row in rows if not row.error}
    keep, trl = by_mode.get("keep"), by_mode.get("trl")
    for row in by_mode.values():
        if keep is None:
            continue
        row.derived["step / keep"] = row.step / keep.step
        if trl is not None and row.tiers:
            row.derived["trl step / step"] = trl.step / row.step
        written, read = sum(row.written.values()), sum(row.read.values())
        if row.mode == "host-free" and link:
            row.derived["hidden / what the link can hide"] = written / (keep.forward * link["out"])
        if row.mode == "host-everything" and link:
            bound = max(keep.forward, written / link["out"]) + max(keep.backward, read / link["back"])
            row.derived["step / bound"] = row.step / bound
        if row.mode == "disk-free" and disk:
            hideable = min(keep.forward * disk["write"], keep.backward * disk["read"])
            row.derived["hidden / what the disk can hide"] = written / hideable
        if row.mode == "disk-everything" and disk:
            for name in ("write", "read"):
                row.derived[f"{name} / raw"] = row.derived.pop(f"{name} bytes a second", math.nan) / disk[name]


# Exactness


def exact(model: Stack, inputs: tuple[Tensor, Tensor], args: argparse.Namespace) -> dict[str, bool]:
    """Whether five optimiser steps under each tidegate mode give keep's losses and weights, bit for bit."""
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    args.verify = True
    torch.use_deterministic_algorithms(True)

    def train(mode: str) -> list[Tensor]:
        model.load_state_dict(start)
        settle(model)
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        losses = []
        with running(mode, model, args) as run:
            for _ in range(5):
                y_BTD = run.forward(inputs[0])
                loss = y_BTD.float().square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
        return [*losses, *(tensor.clone() for tensor in model.state_dict().values())]

    modes = [mode for mode in args.modes if mode.split("-")[0] in ("host", "disk", "cascade")]
    try:
        kept = train("keep")
        same = {mode: all(map(torch.equal, kept, train(mode))) for mode in modes}
    finally:
        torch.use_deterministic_algorithms(False)
        model.load_state_dict(start)
    return same


# Report


def machine(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return f"{name}, {len(os.sched_getaffinity(0))} cores, torch {torch.__version__}"


def table(rows: list[Row], title: str) -> Table:
    view = Table("mode", "step ms", "x keep", "forward", "backward", "after forward GiB", "peak GiB", title=title)
    view.add_column("written, read GB a step")
    view.add_column("ratios")

    def number(nbytes: int | None) -> str:
        return "" if nbytes is None else f"{nbytes / GiB:.2f}"

    for row in rows:
        if row.error:
            view.add_row(row.mode, "-", "", "", "", "", "", "", row.error)
            continue
        moved = "; ".join(
            f"{tier} ({row.tiers.get(tier, '')}) {nbytes / 1e9:.2f}, {row.read.get(tier, 0) / 1e9:.2f}"
            for tier, nbytes in row.written.items()
        )
        ratios = "; ".join(f"{name} {value:.3f}" for name, value in row.derived.items() if name != "step / keep")
        view.add_row(
            row.mode,
            f"{1e3 * row.step:.1f} ({1e3 * row.fastest:.1f}-{1e3 * row.slowest:.1f})",
            f"{row.derived.get('step / keep', math.nan):.3f}",
            f"{1e3 * row.forward:.1f}",
            f"{1e3 * row.backward:.1f}",
            number(row.after_forward),
            number(row.peak),
            moved,
            ratios,
        )
    return view


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, help="a shape and its modes; other arguments override it")
    parser.add_argument("--model", choices=MODELS, default=argparse.SUPPRESS)
    for name in ("hidden", "layers", "batch", "sequence"):
        parser.add_argument(f"--{name}", type=int, default=argparse.SUPPRESS)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=argparse.SUPPRESS, help="timed steps; default 7")
    parser.add_argument("--warm-up", type=int, help="steps before; default 10 for free, 2 for everything, else 4")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--head", type=int, default=128, help="size of an attention head")
    parser.add_argument("--attention-dropout", type=float, help="default 0.1 on a GPU, 0 on the CPU")
    parser.add_argument(
        "--disk-path", nargs="+", default=[tempfile.gettempdir()], help="directories on the disks to use"
    )
    parser.add_argument("--raw-gib", type=float, default=4.0, help="bytes a pass of the raw disk loop")
    for name in ("window", "host-budget", "disk-budget", "min-bytes"):
        parser.add_argument(f"--{name}", help="as in OffloadConfig")
    parser.add_argument("--io-threads", type=int, help="as in OffloadConfig")
    parser.add_argument("--verify", action="store_true", help="checksum every unit")
    parser.add_argument(
        "--exact", action="store_true", help="compare five deterministic optimiser steps with keep's, too"
    )
    parser.add_argument("--trace", help="profile one step of each mode and write what it showed to this directory")
    parser.add_argument("--json", type=Path, help="write the figures there")
    defaults: dict[str, Any] = {"model": "gpt", "hidden": 1024, "layers": 4, "batch": 8, "sequence": 512}
    defaults |= {"modes": ["keep", "host-free", "host-everything"], "steps": 7}
    args = parser.parse_args()
    return argparse.Namespace(**(defaults | PRESETS.get(args.preset, {}) | vars(args)))


def main() -> None:
    args = parse()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    dropout = (0.1 if device.type == "cuda" else 0.0) if args.attention_dropout is None else args.attention_dropout
    with torch.device(device):
        model = build(args.model, args.hidden, args.layers, head=args.head, attention_dropout=dropout).to(dtype)
        shape = (args.batch, args.sequence, args.hidden)
        inputs = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype) / math.prod(shape) ** 0.5
    link = link_rates(device) if device.type == "cuda" else {}
    uses_disk = any(mode.startswith(("disk", "cascade")) for mode in args.modes)
    disk = disk_rates(args.disk_path, int(args.raw_gib * GiB), args.io_threads or 4) if uses_disk else {}
    rows = [measure(mode, model, inputs, args) for mode in args.modes]
    derive(rows, link, disk)
    same = exact(model, inputs, args) if args.exact else {}
    title = (
        f"{args.model} {args.hidden}/{args.layers}, {args.batch} x {args.sequence}, {args.dtype}; {machine(device)}; "
        + "raw GB/s: "
        + ", ".join(f"{name} {rate / 1e9:.2f}" for name, rate in (link | disk).items())
    )
    console = Console(width=None if sys.stdout.isatty() else 220)
    console.print(table(rows, title))
    for row in rows:
        if row.trace:
            console.print(row.mode, row.trace)
    if same:
        console.print("the same bits as keep after five optimiser steps, every unit's checksum equal:", same)
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    figures = {
        "machine": machine(device),
        "settings": {name: value for name, value in settings.items() if name not in ("json", "trace", "disk_path")},
        "raw": link | disk,
        "rows": [asdict(row) for row in rows],
        "exact": same,
    }
    if args.json:
        with contextlib.suppress(FileExistsError):
            args.json.parent.mkdir(parents=True)
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
