r"""What it costs to hold fewer activations on one GPU: tidegate beside checkpointing and other ways to offload.

    python benchmarks/activations.py --preset 8192 --json out.json
    python benchmarks/activations.py --model gpt --hidden 8192 --layers 4 --batch 16 --sequence 1024 \
        --modes keep trl host-aware host-everything
    python benchmarks/activations.py --hidden 1024 --layers 4 --exact --modes keep host-aware disk-everything

All modes run one after the other in one process over the same model. A step is a forward and a backward; its time is
the median over the timed steps, by device events. Raw copy and disk rates are measured in the same run. "aware" moves
what costs no time (device_budget="free"), "everything" all that may move (device_budget=0). Each mode's figures are
printed, and written to --json, as soon as they are there.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import importlib.util
import json
import logging
import math
import mmap
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

if "--exact" in sys.argv:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts

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
    "host-aware",
    "host-everything",
    "disk-aware",
    "disk-everything",
    "cascade-everything",
)
PRESETS: dict[str, dict[str, Any]] = {
    "8192": {
        "hidden": 8192,
        "layers": 4,
        "batch": 16,
        "sequence": 1024,
        "modes": ["keep", "checkpoint", "trl", "host-aware", "host-everything"],
    },
    "4096": {
        "hidden": 4096,
        "layers": 8,
        "batch": 16,
        "sequence": 2048,
        "modes": ["keep", "checkpoint", "trl", "host-aware", "host-everything"],
    },
    "disk": {
        "hidden": 8192,
        "layers": 8,
        "batch": 2,
        "sequence": 1024,
        "modes": ["keep", "disk-aware", "disk-everything"],
        "steps": 5,
    },
}
for _name, _models in (("bert", ["bert"]), ("t5", ["t5"]), ("others", ["bert", "t5"])):
    PRESETS[_name] = PRESETS["8192"] | {"model": _models, "modes": ["keep", "host-aware"]}

WARM_UP = {"aware": 10, "everything": 2}
"""Steps before the timed ones; four in other modes."""

_log = logging.getLogger("activations")


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

    def allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.cuda else 0


@dataclass
class Row:
    """Figures of one mode. Seconds are medians of a step; bytes are of a step.

    Args:
        model: "gpt", "bert" or "t5".
        mode: One of MODES.
        after_forward: Bytes allocated when forward has been enqueued, over weights and inputs.
        peak: The most bytes allocated in a step, gradients too, over weights and inputs.
        retries: How often the caching allocator ran dry over the timed steps.
        stats: The session's own figures, over all timed steps.
        rates: Bytes a second: "out" and "back" over a whole forward and backward; "write" and "read" of a disk alone.
        exact: Whether optimiser steps gave keep's losses and weights, bit for bit, and the bytes that moved meanwhile.
    """

    model: str
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
    demoted: dict[str, float] = field(default_factory=dict)
    pinned: int = 0
    pinned_asked: int = 0
    stall: float = 0.0
    tiers: dict[str, str] = field(default_factory=dict)
    stats: dict[str, object] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    derived: dict[str, float] = field(default_factory=dict)
    trace: dict[str, Any] = field(default_factory=dict)
    exact: dict[str, Any] = field(default_factory=dict)
    loss: float = math.nan
    error: str = ""

    @property
    def offloads(self) -> bool:
        return is_ours(self.mode)

    @property
    def out(self) -> float:
        """Bytes that left the device."""
        return sum(self.written.values()) - sum(self.demoted.values())

    @property
    def back(self) -> float:
        """Bytes that came back from a tier."""
        return sum(self.read.values())


def is_ours(mode: str) -> bool:
    return mode.startswith(("host-", "disk-", "cascade-"))


# Modes


@dataclass
class Running:
    """A mode that is set up: how to run a forward, and the session if there is one."""

    forward: Callable[[Tensor], Tensor]
    session: tidegate.OffloadSession | None = None


def offload_config(mode: str, args: argparse.Namespace) -> tidegate.OffloadConfig:
    place, amount = mode.split("-")
    tiers = {"host": ("host",), "disk": ("disk",), "cascade": ("host", "disk")}[place]
    options: dict[str, Any] = {"tiers": tiers, "device_budget": "free" if amount == "aware" else 0}
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
    make = trl_module().get_act_offloading_ctx_manager
    manager: AbstractContextManager[Any] = make(model, use_pin_memory=True, use_streams=True, warn_if_no_head=False)
    return manager


def trl_module() -> ModuleType:
    """The module alone where the rest of TRL cannot be imported: it needs nothing of it."""
    try:
        return importlib.import_module("trl.models.activation_offloading")
    except ImportError:
        package = importlib.util.find_spec("trl")
        if package is None or not package.submodule_search_locations:
            raise
        path = Path(package.submodule_search_locations[0], "models", "activation_offloading.py")
        spec = importlib.util.spec_from_file_location("trl_activation_offloading", path)
        if spec is None or spec.loader is None:
            raise
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


# Measuring


def measure(name: str, mode: str, model: Stack, inputs: tuple[Tensor, Tensor], args: argparse.Namespace) -> Row:
    row, clock = Row(name, mode), Clock(inputs[0].device)
    settle(model)
    weights = clock.allocated()
    try:
        with running(mode, model, args) as run:
            warm_up = WARM_UP.get(mode.split("-")[-1], 4) if args.warm_up is None else args.warm_up
            for number in range(warm_up):
                step(run, model, inputs, clock, number)
            if run.session is not None:
                run.session.reset_stats()
            retries = 0
            if clock.cuda:
                torch.cuda.reset_peak_memory_stats()
                retries = torch.cuda.memory_stats()["num_alloc_retries"]
            steps = [step(run, model, inputs, clock, number) for number in range(args.steps)]
            if clock.cuda:
                row.after_forward = int(statistics.median(one.allocated for one in steps)) - weights
                row.peak = torch.cuda.max_memory_allocated() - weights
                row.retries = torch.cuda.memory_stats()["num_alloc_retries"] - retries
            fill(row, steps, run.session)
            if mode == "disk-everything" and run.session is not None:
                row.rates |= paced(run, run.session, model, inputs, clock)
            if args.trace:
                row.trace = traced(run, model, inputs, clock, Path(args.trace) / f"{name}-{mode}.json")
    except Exception as error:
        _log.warning("%s: %s fails", name, mode, exc_info=True)
        row.error = f"{type(error).__name__}: {error}"[:300]
    settle(model)
    return row


@dataclass(frozen=True)
class Step:
    """Seconds of one step's forward and backward, bytes allocated between them, and a number for the output."""

    forward: float
    backward: float
    allocated: int
    loss: float


def step(run: Running, model: Stack, inputs: tuple[Tensor, Tensor], clock: Clock, seed: int) -> Step:
    """Runs one step; steps of the same seed draw the same dropout in every mode."""
    clear(model)
    torch.manual_seed(seed)
    clock.synchronize()
    (start, turn, end), allocated, y_BTD = passes(run, inputs, clock)
    clock.synchronize()
    loss = float(torch.linalg.vector_norm(y_BTD, dtype=torch.float32))
    return Step(clock.seconds(start, turn), clock.seconds(turn, end), allocated, loss)


def passes(run: Running, inputs: tuple[Tensor, Tensor], clock: Clock) -> tuple[tuple[Any, Any, Any], int, Tensor]:
    """Enqueues forward and backward; gives the stamps around them, bytes allocated between, and the output."""
    x_BTD, gradient_BTD = inputs
    start = clock.stamp()
    y_BTD = run.forward(x_BTD)
    turn = clock.stamp()
    allocated = clock.allocated()
    y_BTD.backward(gradient_BTD)
    return (start, turn, clock.stamp()), allocated, y_BTD.detach()


def paced(
    run: Running, session: tidegate.OffloadSession, model: Stack, inputs: tuple[Tensor, Tensor], clock: Clock
) -> dict[str, float]:
    """Bytes a second of writing alone, until the last byte of a forward is stored, and of reading alone."""
    rates: dict[str, list[float]] = {"write": [], "read": []}
    for _ in range(3):
        clear(model)
        clock.synchronize()
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
    return {name: statistics.median(some) for name, some in rates.items()}


def fill(row: Row, steps: Sequence[Step], session: tidegate.OffloadSession | None) -> None:
    totals = [one.forward + one.backward for one in steps]
    row.step, row.fastest, row.slowest = statistics.median(totals), min(totals), max(totals)
    row.forward = statistics.median(one.forward for one in steps)
    row.backward = statistics.median(one.backward for one in steps)
    row.loss = steps[-1].loss
    if session is None:
        return
    stats, count = session.stats(), len(steps)
    for name in ("written", "read", "forwarded", "demoted"):
        setattr(row, name, {tier: nbytes / count for tier, nbytes in getattr(stats, name).items()})
    row.pinned, row.pinned_asked, row.stall = stats.pinned, stats.pinned_asked, stats.stall_seconds / count
    row.tiers, row.stats = dict(stats.modes), stats.to_dict()
    row.rates = {"out": row.out / row.forward, "back": row.back / row.backward}


def clear(model: Stack) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def settle(model: Stack) -> None:
    """Gives back what a mode has left, host memory that torch keeps page-locked too."""
    clear(model)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        empty_host_cache = getattr(torch._C, "_host_emptyCache", None) or getattr(
            torch.accelerator.memory, "empty_host_cache", None
        )
        if empty_host_cache is not None:
            empty_host_cache()


# Traces


def traced(run: Running, model: Stack, inputs: tuple[Tensor, Tensor], clock: Clock, path: Path) -> dict[str, Any]:
    """Profiles one step, leaves the trace at `path`, and gives its summary."""
    from torch.profiler import ProfilerActivity, profile, record_function, schedule

    path.parent.mkdir(parents=True, exist_ok=True)
    with profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if clock.cuda else [])],
        schedule=schedule(wait=0, warmup=1, active=1, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        acc_events=True,
    ) as profiler:
        for _ in range(2):
            clear(model)
            clock.synchronize()
            with record_function(MARK):
                passes(run, inputs, clock)
            clock.synchronize()
            profiler.step()
    return summary(json.loads(path.read_text())["traceEvents"])


MARK = "one step"


def summary(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Where a step's time goes: how long the device computes, copies and idles, and what the host waits for.

    Args:
        events: Of a Chrome trace; times in microseconds. The compute stream is the one whose kernels take longest.
            Waits are those of all threads while the host enqueues the step.
    """
    spans = [event for event in events if event.get("ph") == "X"]
    result: dict[str, Any] = {"host waits": {}}
    mark = next((event for event in spans if event["name"] == MARK and "gpu" not in event.get("cat", "")), None)
    for event in spans:
        inside_step = mark is None or mark["ts"] <= event["ts"] <= mark["ts"] + mark["dur"]
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "Synchronize" in event["name"] and inside_step:
            count, ms = result["host waits"].get(event["name"], (0, 0.0))
            result["host waits"][event["name"]] = (count + 1, ms + event["dur"] / 1e3)
    streams: dict[int, float] = {}
    for event in spans:
        if event.get("cat") == "kernel":
            stream = event["args"]["stream"]
            streams[stream] = streams.get(stream, 0.0) + event["dur"]
    if streams:
        compute = max(streams, key=lambda stream: streams[stream])
        busy = united(
            event
            for event in spans
            if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and event["args"]["stream"] == compute
        )
        idle = [(start - stop) / 1e3 for (_, stop), (start, _) in pairwise(busy)]
        result["compute busy ms"], result["compute idle ms"] = length(busy), sum(idle)
        result["longest idle ms"] = max(idle, default=0.0)
    for name in ("DtoH", "HtoD"):
        copies = [event for event in spans if event.get("cat") == "gpu_memcpy" and name in event["name"]]
        ms = length(united(copies))
        if ms:
            nbytes = sum(event["args"].get("bytes", 0) for event in copies)
            result[f"{name} busy ms"], result[f"{name} GB/s"] = ms, nbytes / ms / 1e6
    return result


def united(events: Iterator[dict[str, Any]] | Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    """Spans in which at least one of the events runs."""
    joined: list[tuple[float, float]] = []
    for start, stop in sorted((event["ts"], event["ts"] + event["dur"]) for event in events):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return joined


def length(spans: Sequence[tuple[float, float]]) -> float:
    """Milliseconds of spans in microseconds."""
    return sum(stop - start for start, stop in spans) / 1e3


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
    """Bytes a second of a bare O_DIRECT loop over one file in each path at once: write, read, and each of both."""
    total = total // (2 * CHUNK) * 2 * CHUNK
    half = total // 2
    memory = mmap.mmap(-1, CHUNK)
    memory.write(os.urandom(CHUNK))
    view = memoryview(memory)
    raws = [Raw(path, total, threads) for path in paths]
    readers = [copy.copy(raw) for raw in raws]  # the same files with threads of their own
    for reader in readers:
        reader.pool = ThreadPoolExecutor(threads)

    def later_half(raw: Raw) -> None:
        raw.run(lambda fd, target, offset: os.preadv(fd, [target], half + offset), view, CHUNK, half)

    def rate(nbytes: int, *work: Callable[[], None]) -> float:
        started = time.perf_counter()
        list(pool.map(lambda call: call(), work))
        return len(raws) * nbytes / (time.perf_counter() - started)

    rates: dict[str, list[float]] = {"write": [], "read": [], "write and read": []}
    try:
        with ThreadPoolExecutor(2 * len(raws)) as pool:
            for turn in range(4):
                write = rate(total, *(lambda raw=raw: raw.write(view, CHUNK, total) for raw in raws))
                if not turn:  # the first pass turns allocated blocks into written ones
                    continue
                rates["write"].append(write)
                rates["read"].append(rate(total, *(lambda raw=raw: raw.read(view, CHUNK, total) for raw in raws)))
                both = [lambda raw=raw: raw.write(view, CHUNK, half) for raw in raws]
                both += [lambda raw=raw: later_half(raw) for raw in readers]
                rates["write and read"].append(rate(half, *both))
    finally:
        for raw in (*raws, *readers):
            raw.pool.shutdown()
        for raw in raws:
            os.close(raw.fd)
    return {name: statistics.median(some) for name, some in rates.items()}


def raw_rates(device: torch.device, args: argparse.Namespace) -> dict[str, float]:
    """What copies and disks can do here, bytes a second; what cannot be measured is missing."""
    rates = link_rates(device) if device.type == "cuda" else {}
    if any(mode.startswith(("disk-", "cascade-")) for mode in args.modes):
        try:
            rates |= disk_rates(args.disk_path, int(args.raw_gib * GiB), args.io_threads or 4)
        except OSError as error:
            _log.warning("no raw disk rates: %s", error)
    return rates


def derive(rows: list[Row], raw: dict[str, float]) -> None:
    """Ratios between the modes of one model, and of what was moved to what could have been."""
    done = [row for row in rows if not row.error]
    by_mode = {row.mode: row for row in reversed(done)}
    keep, trl = by_mode.get("keep"), by_mode.get("trl")
    for row in done:
        row.derived = {}
        if keep is not None:
            row.derived["step / keep"] = row.step / keep.step
            row.derived["same output as keep"] = float(row.loss == keep.loss)
        if not row.offloads:
            continue
        if trl is not None:
            row.derived["trl step / step"] = trl.step / row.step
            if row.after_forward and trl.after_forward:
                row.derived["after forward / trl"] = row.after_forward / trl.after_forward
        row.derived |= {f"{name} / raw": rate / raw[name] for name, rate in row.rates.items() if name in raw}
        if keep is not None:
            row.derived |= against_limits(row, keep, raw)


def against_limits(row: Row, keep: Row, raw: dict[str, float]) -> dict[str, float]:
    """What a mode reached beside what the link and the disks allow with the bytes that it really moved."""
    infinite = dict.fromkeys(("out", "back", "write", "read"), math.inf)
    rate = infinite | raw
    to_disk, from_disk = row.written.get("disk", 0.0), row.read.get("disk", 0.0)
    found: dict[str, float] = {}
    if row.mode == "host-aware" and "out" in raw:
        found["hidden / what the link can hide"] = row.out / (keep.forward * raw["out"])
    if row.mode == "disk-aware" and "write" in raw:
        hideable = min(keep.forward * raw["write"], keep.backward * raw["read"])
        found["hidden / what the disk can hide"] = row.out / hideable
    if row.mode.endswith("-everything") and raw:
        out = max(row.out / rate["out"], to_disk / rate["write"])
        back = max(row.back / rate["back"], from_disk / rate["read"])
        found["step / bound"] = row.step / (max(keep.forward, out) + max(keep.backward, back))
    return found


# Exactness


def exact(rows: list[Row], model: Stack, inputs: tuple[Tensor, Tensor], args: argparse.Namespace) -> None:
    """Tells whether optimiser steps under each tidegate mode give keep's losses and weights, bit for bit.

    Every unit's checksum is verified. There are five steps, and three more where a mode measures first.
    """
    ours = [row for row in rows if row.offloads]
    count = 8 if any(row.mode.endswith("-aware") for row in ours) else 5
    verifying = argparse.Namespace(**(vars(args) | {"verify": True}))
    start = host_copy(model)
    keep = None
    torch.use_deterministic_algorithms(True)
    try:
        for row in ours:
            try:
                keep = keep or train("keep", model, start, inputs, count, verifying)
                run = train(row.mode, model, start, inputs, count, verifying)
            except Exception as error:
                row.exact = {"error": f"{type(error).__name__}: {error}"[:300]}
                continue
            row.exact = {
                "losses": all(map(torch.equal, keep.losses, run.losses)),
                "weights": all(map(torch.equal, keep.weights, run.weights)),
                "trained": not all(map(torch.equal, start.values(), run.weights)),
                "steps": count,
                "moved": run.moved,
            }
    finally:
        torch.use_deterministic_algorithms(False)
        model.load_state_dict(start)
        settle(model)


@dataclass(frozen=True)
class Trained:
    """What some optimiser steps gave, on the CPU."""

    losses: list[Tensor]
    weights: list[Tensor]
    moved: int


def train(
    mode: str,
    model: Stack,
    start: dict[str, Tensor],
    inputs: tuple[Tensor, Tensor],
    count: int,
    args: argparse.Namespace,
) -> Trained:
    model.load_state_dict(start)
    settle(model)
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, moved = [], 0
    with running(mode, model, args) as run:
        for _ in range(count):
            loss = run.forward(inputs[0]).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().cpu())
        if run.session is not None:
            moved = run.session.stats().moved
    return Trained(losses, list(host_copy(model).values()), moved)


def host_copy(model: Stack) -> dict[str, Tensor]:
    return {name: tensor.to("cpu", copy=True) for name, tensor in model.state_dict().items()}


def is_exact(row: Row) -> bool:
    return bool(row.exact.get("losses") and row.exact.get("weights"))


# Report


def machine(device: torch.device) -> str:
    cores = f"{len(os.sched_getaffinity(0))} cores, torch {torch.__version__}"
    if device.type != "cuda":
        return f"{platform.machine()}, {cores}"
    driver = ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, check=True, capture_output=True, text=True, timeout=20).stdout.split()[0]
    return f"{torch.cuda.get_device_name(device)}, {cores}, CUDA {torch.version.cuda}, driver {driver or 'unknown'}"


def line(row: Row) -> str:
    """The figures of a mode as one short line of JSON: milliseconds, GiB, GB/s."""
    if row.error:
        return json.dumps({"model": row.model, "mode": row.mode, "error": row.error})
    figures: dict[str, Any] = {
        "model": row.model,
        "mode": row.mode,
        "step": round(1e3 * row.step, 1),
        "forward": round(1e3 * row.forward, 1),
        "backward": round(1e3 * row.backward, 1),
        "after forward": in_gib(row.after_forward),
        "peak": in_gib(row.peak),
    }
    for name in ("written", "read"):
        if getattr(row, name):
            figures[name] = {tier: in_gib(nbytes) for tier, nbytes in getattr(row, name).items()}
    return json.dumps(figures | {name: round(value, 3) for name, value in row.derived.items()})


def in_gib(nbytes: float | None) -> float | None:
    return None if nbytes is None else round(nbytes / GiB, 3)


def table(rows: list[Row], title: str) -> Table:
    view = Table("mode", "step ms", "x keep", "forward", "backward", "after forward GiB", "peak GiB", title=title)
    view.add_column("written, read GiB a step")
    view.add_column("GB/s")
    view.add_column("ratios")

    def number(nbytes: int | None) -> str:
        return "" if nbytes is None else f"{nbytes / GiB:.2f}"

    for row in rows:
        if row.error:
            view.add_row(row.mode, "-", "", "", "", "", "", "", "", row.error)
            continue
        moved = "; ".join(
            f"{tier} ({row.tiers.get(tier, '')}) {nbytes / GiB:.2f}, {row.read.get(tier, 0) / GiB:.2f}"
            for tier, nbytes in row.written.items()
        )
        ratios = [f"{name} {value:.3f}" for name, value in row.derived.items() if name not in PLAIN_RATIOS]
        if row.offloads and row.derived.get("same output as keep") == 0:
            ratios.append("OUTPUT DIFFERS FROM KEEP'S")
        if row.retries:
            ratios.append(f"{row.retries} allocator retries")
        view.add_row(
            row.mode,
            f"{1e3 * row.step:.1f} ({1e3 * row.fastest:.1f}-{1e3 * row.slowest:.1f})",
            f"{row.derived.get('step / keep', math.nan):.3f}",
            f"{1e3 * row.forward:.1f}",
            f"{1e3 * row.backward:.1f}",
            number(row.after_forward),
            number(row.peak),
            moved,
            ", ".join(f"{name} {rate / 1e9:.2f}" for name, rate in row.rates.items()),
            "; ".join(ratios),
        )
    return view


PLAIN_RATIOS = ("step / keep", "same output as keep")


def save(path: Path, args: argparse.Namespace, name: str, raw: dict[str, float], rows: list[Row]) -> None:
    settings = {key: value for key, value in vars(args).items() if key not in ("json", "trace", "disk_path")}
    figures = {
        "machine": name,
        "settings": settings,
        "raw": raw,
        "rows": [asdict(row) for row in rows],
        "exact": {f"{row.model} {row.mode}": is_exact(row) for row in rows if row.exact},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(plain(figures), indent=2) + "\n")


def plain(value: Any) -> Any:
    """The same with None for what is no number, as JSON wants it."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--preset",
        type=lambda name: name.removeprefix("mandatory-"),
        choices=PRESETS,
        help="shapes and modes; other arguments override them",
    )
    parser.add_argument("--model", nargs="+", choices=MODELS, default=argparse.SUPPRESS)
    for name in ("hidden", "layers", "batch", "sequence"):
        parser.add_argument(f"--{name}", type=int, default=argparse.SUPPRESS)
    parser.add_argument(
        "--modes",
        nargs="+",
        type=lambda mode: mode.replace("-free", "-aware"),
        choices=MODES,
        default=argparse.SUPPRESS,
    )
    parser.add_argument("--steps", type=int, default=argparse.SUPPRESS, help="timed steps, five or more; default 7")
    parser.add_argument(
        "--warm-up",
        "--warmup",
        type=int,
        help="steps before; default 10 for aware, 2 for everything, else 4",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--head", type=int, default=128, help="size of an attention head")
    parser.add_argument("--attention-dropout", type=float, help="default 0.1 on a GPU, 0 on the CPU")
    parser.add_argument(
        "--disk-path", nargs="+", default=[tempfile.gettempdir()], help="directories on the disks to use"
    )
    parser.add_argument("--raw-gib", type=float, default=4.0, help="GiB a pass of the raw disk loop")
    for name in ("window", "host-budget", "disk-budget", "min-bytes"):
        parser.add_argument(f"--{name}", help="as in OffloadConfig")
    parser.add_argument("--io-threads", type=int, help="as in OffloadConfig")
    parser.add_argument("--verify", action="store_true", help="checksum every unit")
    parser.add_argument(
        "--exact", action="store_true", help="compare deterministic optimiser steps with keep's, too; for small shapes"
    )
    parser.add_argument("--trace", help="profile one step of each mode and leave its trace in this directory")
    parser.add_argument("--json", type=Path, help="write the figures there")
    defaults: dict[str, Any] = {"model": ["gpt"], "hidden": 1024, "layers": 4, "batch": 8, "sequence": 512}
    defaults |= {"modes": ["keep", "host-aware", "host-everything"], "steps": 7}
    args = parser.parse_args()
    args = argparse.Namespace(**(defaults | PRESETS.get(args.preset, {}) | vars(args)))
    if args.steps < 5:
        parser.error("--steps: a median wants five or more")
    return args


def main() -> None:
    args = parse()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    dropout = (0.1 if device.type == "cuda" else 0.0) if args.attention_dropout is None else args.attention_dropout
    console = Console(width=None if sys.stdout.isatty() else 220)
    where, raw = machine(device), raw_rates(device, args)
    limits = "raw GB/s: " + ", ".join(f"{key} {rate / 1e9:.2f}" for key, rate in raw.items())
    print(f"{where}; {limits}", flush=True)
    rows: list[Row] = []
    for name in args.model:
        with torch.device(device):
            model = build(name, args.hidden, args.layers, head=args.head, attention_dropout=dropout).to(dtype)
            shape = (args.batch, args.sequence, args.hidden)
            inputs = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype) / math.prod(shape) ** 0.5
        one_sample = inputs[0][:1], inputs[1][:1]
        step(Running(model), model, one_sample, Clock(device), 0)  # what CUDA allocates once counts for no mode
        own: list[Row] = []
        for mode in args.modes:
            own.append(measure(name, mode, model, inputs, args))
            derive(own, raw)
            print(line(own[-1]), flush=True)
            if own[-1].trace:
                print(json.dumps({"mode": mode, "trace": rounded(own[-1].trace)}), flush=True)
            if args.json:
                save(args.json, args, where, raw, rows + own)
        if args.exact:
            exact(own, model, inputs, args)
        rows += own
        shapes = f"{name} {args.hidden}/{args.layers}, {args.batch} x {args.sequence}, {args.dtype}"
        console.print(table(own, f"{shapes}; {where}; {limits}"))
        for row in own:
            if row.exact:
                print(
                    f"{name} {row.mode}: {'equal to' if is_exact(row) else 'NOT EQUAL to'} keep: {row.exact}",
                    flush=True,
                )
        if args.json:
            save(args.json, args, where, raw, rows)
        del model, inputs, one_sample


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return round(value, 2) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
