"""Trains a model plain and offloaded from the same start, and tells every bit in which the two runs differ."""

from __future__ import annotations

import enum
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

import tidegate
from tidegate import OffloadConfig, OffloadSession, OffloadStats

__all__ = [
    "Schedule",
    "Trace",
    "assert_balanced",
    "assert_nothing_left",
    "assert_same",
    "differences",
    "offloaded_run",
    "plain_run",
    "same_bits",
    "wait_until_away",
]

STEPS = 5


class Schedule(enum.Enum):
    """How forwards, backwards and optimiser steps follow each other."""

    SINGLE = "forward, backward"
    ACCUMULATED = "forward, backward, forward, backward"
    JOINED = "forward, forward, backward of the sum"
    WIDE = "forward inside session.step(), backward outside"
    WHOLE = "forward and backward inside session.step()"


@dataclass(slots=True)
class Trace:
    """What a training run produced.

    Args:
        tensors: Losses, gradients of every step, and parameters, buffers, optimiser state and the state of the
            random numbers at the end, by name.
        stats: What moved; None for a plain run.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    stats: OffloadStats | None = None


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Stricter than torch.equal: NaN equals the same NaN, and -0 is not 0."""
    if left.dtype is not right.dtype or left.shape != right.shape:
        return False
    return torch.equal(_bits(left), _bits(right))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)


def differences(plain: dict[str, Tensor], offloaded: dict[str, Tensor]) -> list[str]:
    """Names of the tensors that only one side has, or that differ in any bit."""
    alone = [f"{name} (only one side has it)" for name in sorted(plain.keys() ^ offloaded.keys())]
    return alone + [name for name in plain if name in offloaded and not same_bits(plain[name], offloaded[name])]


def assert_same(plain: Trace, offloaded: Trace) -> None:
    """Asserts that two runs agree in every bit."""
    assert plain.tensors, "the plain run recorded nothing"
    assert differences(plain.tensors, offloaded.tensors) == []


def plain_run(
    build: Callable[[], nn.Module], *, schedule: Schedule = Schedule.SINGLE, steps: int = STEPS, autocast: bool = False
) -> Trace:
    """Trains a new model without tidegate."""
    return _train(_built(build), None, schedule, steps, autocast)


def offloaded_run(
    build: Callable[[], nn.Module],
    config: OffloadConfig,
    *,
    schedule: Schedule = Schedule.SINGLE,
    steps: int = STEPS,
    autocast: bool = False,
) -> Trace:
    """Trains a new model under a session, and asserts what every session must keep: books, bounds and cleanness."""
    model = _built(build)
    session = tidegate.attach(model, config)
    try:
        trace = _train(model, session, schedule, steps, autocast)
        assert_nothing_left(session)
        trace.stats = session.stats()
    finally:
        directories = session.spill_dirs
        session.close()
    assert_removed(directories)
    return trace


def assert_balanced(stats: OffloadStats) -> None:
    """Asserts that every written byte is accounted for, tier by tier."""
    for tier, written in stats.written.items():
        ends = {
            name: getattr(stats, name).get(tier, 0) for name in ("read", "forwarded", "dropped", "demoted", "pending")
        }
        assert written == sum(ends.values()), f"{tier}: {written} bytes written, {ends}"


def assert_nothing_left(session: OffloadSession) -> None:
    """Asserts that dead graphs left no bytes behind, on the device or in a tier, and that the books agree."""
    gc.collect()
    stats = session.stats()
    assert stats.resident == 0
    assert not any(stats.pending.values()), f"pending: {dict(stats.pending)}"
    assert_balanced(stats)


def assert_removed(directories: tuple[Path, ...]) -> None:
    """Asserts that a closed session's run directories are gone."""
    assert [path for path in directories if path.exists()] == []


def wait_until_away(session: OffloadSession) -> None:
    """Waits until no write is under way, so that backward really reads what was written."""
    engine = session._engine
    with engine._changed:
        assert engine._changed.wait_for(lambda: not engine._leaving_bytes, timeout=60), "a write never ended"


def _built(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = build()
    torch.manual_seed(1)
    return model


def _train(model: nn.Module, session: OffloadSession | None, schedule: Schedule, steps: int, autocast: bool) -> Trace:
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    trace = Trace()
    for step in range(steps):
        for index, loss in enumerate(_losses(model, session, schedule, step, autocast)):
            trace.tensors[f"step {step} loss {index}"] = loss
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                trace.tensors[f"step {step} grad {name}"] = parameter.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    trace.tensors |= {f"end {name}": tensor.clone() for name, tensor in model.state_dict().items()}
    trace.tensors |= {f"end {name} buffer": tensor.clone() for name, tensor in model.named_buffers()}
    trace.tensors["end random numbers"] = torch.get_rng_state()
    return trace


def _losses(
    model: nn.Module, session: OffloadSession | None, schedule: Schedule, step: int, autocast: bool
) -> Iterator[Tensor]:
    def step_region() -> AbstractContextManager[object]:
        return nullcontext() if session is None else session.step()

    def forward(batch: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss: Tensor = model(batch)
        if session is not None and step % 2 == 0:  # in the other steps backward races with the writes
            wait_until_away(session)
        return loss

    match schedule:
        case Schedule.SINGLE:
            losses = [forward(step)]
            losses[0].backward()
        case Schedule.ACCUMULATED:
            losses = []
            for micro in (2 * step, 2 * step + 1):
                losses.append(forward(micro))
                (losses[-1] / 2).backward()
        case Schedule.JOINED:
            losses = [forward(2 * step), forward(2 * step + 1)]
            torch.stack(losses).sum().backward()
        case Schedule.WIDE:
            with step_region():
                losses = [forward(step).square()]
            losses[0].backward()
        case Schedule.WHOLE:
            with step_region():
                losses = [forward(step).square()]
                losses[0].backward()
    yield from (loss.detach() for loss in losses)
