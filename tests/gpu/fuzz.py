"""Random programs under random delays: kernels that sleep on every stream, and freed blocks that are overwritten.

A mover that orders too little reads or hands out memory too early; the delays open that window and the poison shows it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import tidegate
from tidegate import OffloadConfig
from tidegate.offload.transfer_cuda import CudaMover

__all__ = ["FAULTS", "Chaos", "Program", "differs", "faulty", "gradients", "random_config", "sleepy"]

WIDTH = 128
MiB = 2**20
_SHORT, _LONG = 20_000, 1_000_000  # clock cycles: about 10 microseconds, half a millisecond


class Chaos:
    """Delays and poison, drawn from a seed, on the stream that is current."""

    def __init__(self, seed: int, chance: float = 0.3) -> None:
        self._random = random.Random(seed)
        self._chance = chance

    def sleep(self) -> None:
        if self._random.random() < self._chance:
            torch.cuda._sleep(self._random.choice((_SHORT, _LONG)))

    def poison(self, nbytes: int) -> None:
        """Takes whatever free block of this size the allocator has, and spoils it."""
        blocks = [torch.full((nbytes // 4,), float("nan"), device="cuda") for _ in range(self._random.randint(0, 3))]
        del blocks


class Program(nn.Module):
    """A chain of operations on values made before, on one or two streams; the same seed gives the same program."""

    def __init__(self, seed: int, chaos: Chaos | None, device: str = "cuda") -> None:
        super().__init__()
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.chaos = chaos
        self.side = torch.cuda.Stream() if device == "cuda" else None
        self.steps = [
            (rng.choice(sorted(OPERATIONS)), rng.randrange(1 << 16), rng.random() < 0.15)
            for _ in range(rng.randint(5, 12))
        ]
        self.rows = rng.choice((64, 256, 512))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in self.steps)
        self.to(device)

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for layer, (operation, pick, beside) in zip(self.layers, self.steps, strict=True):
            operand, other = values[pick % len(values)], values[-1]
            self._disturb(operand)
            if beside and self.side is not None:
                main = torch.cuda.current_stream()
                self.side.wait_stream(main)
                with torch.cuda.stream(self.side):
                    self._disturb(operand)
                    value = OPERATIONS[operation](layer, operand, other)
                main.wait_stream(self.side)
                value.record_stream(main)
            else:
                value = OPERATIONS[operation](layer, operand, other)
            if self.chaos is not None and value.requires_grad:
                value.register_hook(self._disturb_backward)
            values.append(value)
        return torch.stack([value.float().square().mean() for value in values[1:]]).sum()

    def _disturb(self, value: Tensor) -> None:
        if self.chaos is not None:
            self.chaos.sleep()
            self.chaos.poison(value.nbytes)

    def _disturb_backward(self, gradient: Tensor) -> None:
        self._disturb(gradient)


OPERATIONS: dict[str, Callable[[nn.Module, Tensor, Tensor], Tensor]] = {
    "linear": lambda layer, x, y: layer(x),
    "gelu": lambda layer, x, y: nn.functional.gelu(layer(x)),
    "sine": lambda layer, x, y: x.sin(),
    "product": lambda layer, x, y: layer(x) * y,
    "norm": lambda layer, x, y: nn.functional.layer_norm(layer(x) + y, (WIDTH,)),
    "dropout": lambda layer, x, y: nn.functional.dropout(layer(x), 0.2),
    "softmax": lambda layer, x, y: layer(x).softmax(-1) + y,
    "chunks": lambda layer, x, y: torch.cat([part.exp() for part in layer(x).tanh().chunk(3, dim=-1)], dim=-1),
    "transposed": lambda layer, x, y: (layer(x).t().contiguous().sigmoid().t() + y).relu(),
    "matmul": lambda layer, x, y: (x @ y.t()).tanh() @ x / x.shape[0],
}


def gradients(
    seed: int, config: OffloadConfig | None, *, chaos: bool, steps: int = 2, chance: float = 0.3, device: str = "cuda"
) -> tuple[list[Tensor], int]:
    """Losses and gradients of a few steps of the program of a seed, and the bytes that were moved.

    Args:
        seed: Of the program, its weights, its inputs and its dropout.
        config: None runs it plain.
        chaos: Delays and poison; on a GPU only.
        steps: Steps.
        chance: Of a delay between two operations.
        device: "cuda", or "cpu" for the same program without streams.
    """
    model = Program(seed, Chaos(seed, chance) if chaos else None, device)
    seen: list[Tensor] = []
    session = None if config is None else tidegate.attach(model, config)
    try:
        for step in range(steps):
            torch.manual_seed(1000 * seed + step)
            x = torch.randn(model.rows, WIDTH, device=device, requires_grad=True)
            loss = model(x)
            loss.backward()
            seen += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            if x.grad is not None:
                seen.append(x.grad)
            model.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        return seen, 0 if session is None else session.stats().moved
    finally:
        if session is not None:
            session.close()


def differs(plain: list[Tensor], other: list[Tensor]) -> bool:
    """Whether two runs differ in any bit."""
    return len(plain) != len(other) or not all(
        torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(plain, other, strict=True)
    )


def random_config(seed: int, directory: str, **changes: Any) -> OffloadConfig:
    """Tiers, window and amount, drawn from the seed."""
    rng = random.Random(seed)
    settings: dict[str, Any] = {
        "tiers": rng.choice((("host",), ("host",), ("disk",), ("host", "disk"))),
        "device_budget": rng.choice((0, 0, "30%", MiB)),
        "window": rng.choice((1, MiB // 4, 64 * MiB)),
        "host_budget": rng.choice(("2MiB", "256MiB")),
        "disk_budget": "512MiB",
        "disk_paths": (directory,),
        "min_bytes": 1,
    }
    return OffloadConfig(**(settings | changes))


@contextmanager
def sleepy(seed: int) -> Iterator[None]:
    """Delays every copy on its stream, and spoils the memory that bytes go to before they do.

    A span of host memory may be given out while an earlier copy still reads it: whatever is written there next comes
    after that in the order of the stream, so it is spoilt there and not by the CPU.
    """
    chaos = Chaos(seed)
    leave, copy_in = CudaMover.leave, CudaMover._copy_in

    def slow_leave(self: CudaMover, unit: Any) -> Any:
        span = unit.lease if unit.departure.slab is None else unit.departure.slab
        with torch.cuda.stream(self._out):
            poison = torch.full((unit.nbytes,), 255, dtype=torch.uint8, device=unit.device)
            span.tensor[: unit.nbytes].copy_(poison, non_blocking=True)
            chaos.sleep()
        return leave(self, unit)

    def slow_copy_in(self: CudaMover, *arguments: Any) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._in):
            chaos.sleep()
        copy_in(self, *arguments)

    CudaMover.leave, CudaMover._copy_in = slow_leave, slow_copy_in  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        CudaMover.leave, CudaMover._copy_in = leave, copy_in  # type: ignore[method-assign]


@contextmanager
def faulty(fault: str) -> Iterator[None]:
    """Takes one of the mover's waits away."""
    undo = FAULTS[fault]()
    try:
        yield
    finally:
        undo()


def _deaf(attribute: str) -> Callable[[], None]:
    """One of the mover's streams waits for no event."""
    wait_event, made = torch.cuda.Stream.wait_event, CudaMover.__init__
    deaf: set[int] = set()

    def make(self: CudaMover, *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **options)
        deaf.add(getattr(self, attribute).cuda_stream)

    def wait(self: torch.cuda.Stream, event: Any) -> None:
        if self.cuda_stream not in deaf:
            wait_event(self, event)

    torch.cuda.Stream.wait_event, CudaMover.__init__ = wait, make  # type: ignore[method-assign]

    def undo() -> None:
        torch.cuda.Stream.wait_event, CudaMover.__init__ = wait_event, made  # type: ignore[method-assign]

    return undo


def _without(name: str, instead: Callable[..., None]) -> Callable[[], None]:
    original = getattr(CudaMover, name)
    setattr(CudaMover, name, instead)
    return lambda: setattr(CudaMover, name, original)


def _landed_at_once(mover: CudaMover, arrival: Any) -> None:
    if arrival.future is not None:
        arrival.future.result()
    arrival.route.landed = True


FAULTS: dict[str, Callable[[], Callable[[], None]]] = {
    "a copy out does not wait for the bytes to be there": lambda: _deaf("_out"),
    "a copy back does not wait for its room to be free": lambda: _deaf("_in"),
    "memory is let go before the copy": lambda: _without("release", lambda mover, unit: None),
    "backward does not wait for the copy back": lambda: _without("land", _landed_at_once),
}
