"""Random small tensor programs, as data: what hypothesis draws, shrinks and prints."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["OPERATIONS", "Instruction", "Program", "ProgramModule"]


@dataclass(frozen=True, slots=True)
class Instruction:
    """One operation on values made before.

    Args:
        operation: Name in OPERATIONS.
        first, second: Operands, modulo the number of values so far.
        size: A small number that the operation takes its dimensions and positions from.
        grad: False runs it in a no_grad region.
    """

    operation: str
    first: int
    second: int
    size: int
    grad: bool


@dataclass(frozen=True, slots=True)
class Program:
    """Instructions, the values that form the loss, and how backward is run.

    Args:
        instructions: In order.
        losses: Values that are summed into the loss, modulo their number.
        late: In-place edits between the loss and backward.
        backward: "once", "twice" (retain_graph), "create_graph" (and backward through it) or "never".
    """

    instructions: tuple[Instruction, ...]
    losses: tuple[int, ...]
    late: tuple[Instruction, ...]
    backward: str


class _SavesBoth(torch.autograd.Function):
    """Saves a view of its input and its output; unpacks them twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(x[..., :1], y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        first, y = ctx.saved_tensors
        again, _ = ctx.saved_tensors
        return grads[0] * y + 0 * (first + again)


def _dim(x: Tensor, size: int) -> int:
    return size % max(x.dim(), 1)


def _matrix(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1, 1)


def _like(y: Tensor, x: Tensor) -> Tensor:
    """`y`, made to broadcast against `x`."""
    return y if y.shape == x.shape else y.reshape(-1)[:1].sum()


def _rows(x: Tensor, size: int) -> Tensor:
    length = max(x.shape[0], 1) if x.dim() else 1
    return torch.tensor([size % length, (3 * size + 1) % length, size % length])


def _chunk(x: Tensor, _: Tensor, size: int) -> Tensor:
    parts = x.chunk(2 + size % 2, _dim(x, size))
    return parts[size % len(parts)]


def _unsafe_chunk(x: Tensor, _: Tensor, size: int) -> Tensor:
    parts = torch.unsafe_chunk(x * 1, 2, _dim(x, size))
    for part in parts:
        part.sigmoid_()
    return parts[0] * parts[-1] if len(parts) == 2 and parts[0].shape == parts[1].shape else parts[0]


def _matmul(x: Tensor, y: Tensor, _: int) -> Tensor:
    left, right = _matrix(x), _matrix(y)
    return (left @ right.t() if left.shape[1] == right.shape[1] else left.t() @ left).clamp(-4, 4)


def _cat(x: Tensor, y: Tensor, size: int) -> Tensor:
    return torch.cat([x, y], _dim(x, size)) if x.shape == y.shape else torch.cat([x.flatten(), y.flatten()])


def _square(x: Tensor, y: Tensor, _: int) -> Tensor:
    return torch.einsum("ij,kj->ik", _matrix(x), _matrix(x)).tanh() * _like(y, x).sum()


def _complex(x: Tensor, y: Tensor, size: int) -> Tensor:
    z = torch.complex(x, _like(y, x).expand(x.shape).clone())
    parts = (z.conj() * z.exp()).abs(), z.conj().imag * z.real, (z.conj() * z.mul(2j)).imag
    return parts[size % 3]


def _put(x: Tensor, y: Tensor, size: int) -> Tensor:
    x[_rows(x, size)] = _like(y, x).sum()
    return x


def _set_slice(x: Tensor, y: Tensor, size: int) -> Tensor:
    x[size % 2 :] *= _like(y, x).reshape(-1)[:1].sum()
    return x


def _checkpointed(x: Tensor, y: Tensor, size: int) -> Tensor:
    # A view made under no_grad claims to need a gradient and gets none. torch restores it as a leaf that gets one as
    # soon as any saved-tensor hooks are there, so that checkpoint saves other tensors than before: not ours to mend.
    left, right = x * 1, _like(y, x) * 1
    result: Tensor = checkpoint(lambda a, b: (a * b).sin() * a, left, right, use_reentrant=False)
    return result


OPERATIONS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    # Views
    "flatten": lambda x, y, n: x.flatten(),
    "halves": lambda x, y, n: x.reshape(2, -1) if x.numel() % 2 == 0 else x.reshape(1, -1),
    "transpose": lambda x, y, n: x.transpose(0, -1) if x.dim() > 1 else x,
    "shift": lambda x, y, n: x.flatten()[1:] if x.numel() > 1 else x,
    "stride": lambda x, y, n: x[..., :: 2 + n % 3] if x.dim() else x,
    "select": lambda x, y, n: x.select(_dim(x, n), 0) if x.dim() > 1 else x,
    "expand": lambda x, y, n: x.unsqueeze(0).expand(2, *x.shape) if x.numel() < 200 else x,
    "windows": lambda x, y, n: x.flatten().unfold(0, 2, 1) if x.numel() > 1 else x,
    "chunk": _chunk,
    "diagonal": lambda x, y, n: x.diagonal() if x.dim() == 2 else x,
    "alias": lambda x, y, n: x.view_as(x),
    # Operations that save inputs, outputs, masks or indices
    "mul": lambda x, y, n: x * _like(y, x),
    "square": lambda x, y, n: x * x,
    "add": lambda x, y, n: x + _like(y, x),
    "div": lambda x, y, n: x / (1 + _like(y, x).square()),
    "sin": lambda x, y, n: x.sin(),
    "tanh": lambda x, y, n: x.tanh(),
    "exp": lambda x, y, n: x.clamp(-3, 1).exp(),
    "relu": lambda x, y, n: x.relu(),
    "softmax": lambda x, y, n: x.softmax(-1) if x.dim() else x,
    "norm": lambda x, y, n: torch.layer_norm(x, x.shape[-1:]) if x.dim() else x,
    "cumsum": lambda x, y, n: x.flatten().cumprod(0),
    "dropout": lambda x, y, n: torch.dropout(x, 0.3, True),
    "matmul": _matmul,
    "einsum": _square,
    "cat": _cat,
    "where": lambda x, y, n: torch.where(x > 0, x * 2, _like(y, x).square()),
    "maximum": lambda x, y, n: x.amax(0, keepdim=True) * x if x.dim() and x.numel() else x,
    "sort": lambda x, y, n: x.sort(-1).values if x.dim() else x,
    "index": lambda x, y, n: x[_rows(x, n)] if x.dim() and len(x) else x,
    "index_add": lambda x, y, n: (
        torch.zeros_like(x).index_add(0, _rows(x, n), x[_rows(x, n)]) if x.dim() and len(x) else x
    ),
    "mask": lambda x, y, n: x[x > 0],
    "complex": _complex,
    "unsafe_chunk": _unsafe_chunk,
    "custom": lambda x, y, n: _SavesBoth.apply(x.clamp(-3, 1)) if x.dim() else x,
    "checkpoint": _checkpointed,
    # Copies and cuts
    "clone": lambda x, y, n: x.clone(),
    "contiguous": lambda x, y, n: x.contiguous(),
    "half": lambda x, y, n: x.bfloat16().float(),
    "detach": lambda x, y, n: x.detach(),
    # Edits in place
    "mul_": lambda x, y, n: x.mul_(_like(y, x)),
    "add_": lambda x, y, n: x.add_(1),
    "relu_": lambda x, y, n: x.relu_(),
    "sigmoid_": lambda x, y, n: x.sigmoid_(),
    "exp_": lambda x, y, n: x.clamp_(-3, 1).exp_(),
    "zero_": lambda x, y, n: x.zero_(),
    "copy_": lambda x, y, n: x.copy_(_like(y, x)),
    "fill": lambda x, y, n: x.masked_fill_(x > 1, 0.5),
    "put": _put,
    "set_slice": _set_slice,
}
"""Each takes two values and a small number, and returns a value; edits return what they edited."""


class ProgramModule(nn.Module):
    """Runs one program: its forward returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 6))

    def forward(self, program: Program, leaves: list[Tensor]) -> Tensor:
        values = [self.weight, *leaves, *(leaf * 2 for leaf in leaves)]  # leaves refuse edits, copies take them
        for instruction in program.instructions:
            values.append(self.apply_to(values, instruction))
        total: Tensor = sum(
            (values[index % len(values)].float().sum() for index in program.losses), start=torch.zeros(())
        )
        for instruction in program.late:
            self.apply_to(values, instruction)
        return total

    @staticmethod
    def apply_to(values: list[Tensor], instruction: Instruction) -> Tensor:
        # The latest values are the likeliest operands, so that programs grow deep.
        first, second = (values[-1 - index % len(values)] for index in (instruction.first, instruction.second))
        with nullcontext() if instruction.grad else torch.no_grad():
            return OPERATIONS[instruction.operation](first, second, instruction.size)
