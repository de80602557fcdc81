"""Stacks of transformer blocks as the SSDTrain paper measures them: GPT, BERT and T5, without embedding and head.

Shapes: B batch, T sequence, S sequence of the encoder, D hidden size, N heads, H head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["MODELS", "Stack", "build"]

HEAD = 128
DROPOUT = 0.1


class Attention(nn.Module):
    """Self-attention, or cross-attention when `memory` is given."""

    def __init__(self, hidden: int, *, causal: bool, head: int, attention_dropout: float) -> None:
        super().__init__()
        self.heads, self.causal, self.attention_dropout = hidden // head, causal, attention_dropout
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x_BTD: Tensor, memory_BSD: Tensor | None = None) -> Tensor:
        D = x_BTD.shape[-1]
        if memory_BSD is None:
            q, k, v = self.qkv(x_BTD).chunk(3, dim=-1)
        else:
            q = F.linear(x_BTD, self.qkv.weight[:D], self.qkv.bias[:D])
            k, v = F.linear(memory_BSD, self.qkv.weight[D:], self.qkv.bias[D:]).chunk(2, dim=-1)
        q_BNTH, k_BNSH, v_BNSH = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))
        dropout = self.attention_dropout if self.training else 0.0
        y_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BNSH, v_BNSH, dropout_p=dropout, is_causal=self.causal)
        y_BTD: Tensor = self.out(y_BNTH.transpose(1, 2).flatten(2))
        return y_BTD


class Block(nn.Module):
    """Pre-norm block: self-attention, cross-attention for a decoder over an encoder, MLP of four times the width."""

    def __init__(self, hidden: int, *, causal: bool, cross: bool, head: int, attention_dropout: float) -> None:
        super().__init__()
        options = {"head": head, "attention_dropout": attention_dropout}
        self.norm = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, causal=causal, **options)  # type: ignore[arg-type]
        if cross:
            self.cross_norm = nn.LayerNorm(hidden)
            self.cross = Attention(hidden, causal=False, **options)  # type: ignore[arg-type]
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x_BTD: Tensor, memory_BSD: Tensor | None = None) -> Tensor:
        x_BTD = x_BTD + self.dropout(self.attention(self.norm(x_BTD)))
        if memory_BSD is not None:
            x_BTD = x_BTD + self.dropout(self.cross(self.cross_norm(x_BTD), memory_BSD))
        y_BTD: Tensor = x_BTD + self.dropout(self.mlp(self.mlp_norm(x_BTD)))
        return y_BTD


class Stack(nn.Module):
    """Blocks in a row. With an encoder its blocks come first, and the decoder's attend to its output.

    Args:
        encoder: Blocks over the input whose output is the decoder's memory.
        blocks: The other blocks.
        checkpointed: Run every block under torch.utils.checkpoint.
    """

    def __init__(self, encoder: list[Block], blocks: list[Block]) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(encoder)
        self.blocks = nn.ModuleList(blocks)
        self.checkpointed = False

    def forward(self, x_BTD: Tensor) -> Tensor:
        memory_BSD: Tensor | None = None
        if len(self.encoder):
            memory_BSD = x_BTD
            for block in self.encoder:
                memory_BSD = self._run(block, memory_BSD, None)
        for block in self.blocks:
            x_BTD = self._run(block, x_BTD, memory_BSD)
        return x_BTD

    def _run(self, block: nn.Module, x_BTD: Tensor, memory_BSD: Tensor | None) -> Tensor:
        arguments = (x_BTD,) if memory_BSD is None else (x_BTD, memory_BSD)
        y_BTD: Tensor = checkpoint(block, *arguments, use_reentrant=False) if self.checkpointed else block(*arguments)
        return y_BTD


MODELS = ("gpt", "bert", "t5")


def build(model: str, hidden: int, layers: int, *, head: int = HEAD, attention_dropout: float = DROPOUT) -> Stack:
    """Builds a stack of `layers` blocks; T5's are half encoder, half decoder.

    Raises:
        ValueError: The model is unknown, or hidden is no multiple of `head`.
    """
    if model not in MODELS or hidden % head:
        raise ValueError(f"no model {model!r} of width {hidden} with heads of {head}")

    def blocks(count: int, *, causal: bool, cross: bool = False) -> list[Block]:
        return [
            Block(hidden, causal=causal, cross=cross, head=head, attention_dropout=attention_dropout)
            for _ in range(count)
        ]

    torch.manual_seed(0)
    if model == "t5":
        return Stack(blocks(layers // 2, causal=False), blocks(layers - layers // 2, causal=True, cross=True))
    return Stack([], blocks(layers, causal=model == "gpt"))
