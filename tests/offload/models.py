"""Small models that save tensors in every way known to have broken activation offloading somewhere.

Each takes the number of the batch and returns the loss, so that a run is a model and a range of numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["ZOO"]

_VOCABULARY = 96


def _noise(batch: int, *shape: int) -> Tensor:
    """Inputs that depend on the batch alone and leave the global random numbers to dropout."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(batch))


def _tokens(batch: int, *shape: int) -> Tensor:
    return torch.randint(_VOCABULARY, shape, generator=torch.Generator().manual_seed(batch))


class LanguageModel(nn.Module):
    """A model of transformers with labels: causal, masked or sequence to sequence."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.train()

    def forward(self, batch: int) -> Tensor:
        ids_BT = _tokens(batch, 2, 24)
        loss: Tensor = self.model(input_ids=ids_BT, labels=ids_BT).loss
        return loss


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {
        "n_positions": 32,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return LanguageModel(GPT2LMHeadModel(GPT2Config(vocab_size=_VOCABULARY, **sizes)))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    return LanguageModel(BertForMaskedLM(BertConfig(vocab_size=_VOCABULARY, max_position_embeddings=32, **sizes)))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: dict[str, Any] = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    config: Any = T5Config(vocab_size=_VOCABULARY, **sizes)
    config.decoder_start_token_id = 0
    return LanguageModel(T5ForConditionalGeneration(config))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return LanguageModel(
        LlamaForCausalLM(LlamaConfig(vocab_size=_VOCABULARY, num_key_value_heads=2, attention_dropout=0.1, **sizes))
    )


def llama_lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    base: Any = LlamaForCausalLM(LlamaConfig(vocab_size=_VOCABULARY, **sizes))
    lora = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads a name that transformers has renamed
        return LanguageModel(get_peft_model(base, lora))


class ResNet(nn.Module):
    """In-place ReLU after BatchNorm, in-place addition of the shortcut, convolutions in channels-last order."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
            self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x_NCHW: Tensor) -> Tensor:
            y_NCHW = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x_NCHW)))))
            y_NCHW += x_NCHW
            out: Tensor = self.relu(y_NCHW)
            return out

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        )
        self.blocks = nn.Sequential(self.Block(8), self.Block(8))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(8, 5))

    def forward(self, batch: int) -> Tensor:
        x_NCHW = _noise(batch, 4, 3, 16, 16).contiguous(memory_format=torch.channels_last)
        return F.cross_entropy(self.head(self.blocks(self.stem(x_NCHW))), torch.arange(4))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, num_layers=2, dropout=0.1, bidirectional=True, batch_first=True)
        self.head = nn.Linear(32, 1)

    def forward(self, batch: int) -> Tensor:
        states_BTD, (hidden, cell) = self.lstm(_noise(batch, 3, 7, 8))
        return self.head(states_BTD).square().mean() + (hidden * cell).mean()


class Attention(nn.Module):
    """nn.MultiheadAttention, once with its weights (plain softmax) and once without (fused)."""

    def __init__(self) -> None:
        super().__init__()
        self.explicit = nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True)
        self.fused = nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True)

    def forward(self, batch: int) -> Tensor:
        x_BTD = _noise(batch, 3, 9, 16)
        y_BTD, weights_BTT = self.explicit(x_BTD, x_BTD, x_BTD)
        y_BTD, _ = self.fused(y_BTD, y_BTD, y_BTD, need_weights=False)
        return y_BTD.square().mean() + weights_BTT.square().mean()


class TiedWeights(nn.Module):
    """One matrix is embedding and head, and is also used through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_VOCABULARY, 16)
        self.head = nn.Linear(16, _VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, batch: int) -> Tensor:
        ids_BT = _tokens(batch, 3, 8)
        x_BTD = F.dropout(self.tokens(ids_BT), 0.1, self.training)
        x_BTD = x_BTD + torch.tanh(x_BTD @ self.head.weight[:16].t())
        return F.cross_entropy(self.head(x_BTD).flatten(0, 1), ids_BT.flatten())


class Einsum(nn.Module):
    """Einsums, expanded operands and broadcasts: saved tensors with stride 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6, 8))
        self.bias = nn.Parameter(torch.randn(1, 8))

    def forward(self, batch: int) -> Tensor:
        x_BTI = _noise(batch, 3, 5, 6)
        y_BTHO = torch.einsum("bti,hio->btho", x_BTI, self.weight)
        bias_BTHO = self.bias.tanh().expand(3, 5, 4, 8)
        y_BTHO = y_BTHO * bias_BTHO + bias_BTHO.exp()
        scores_BHTS = torch.einsum("btho,bsho->bhts", y_BTHO, y_BTHO) * 0.1
        return (
            torch.einsum("bhts,bsho->btho", scores_BHTS.softmax(-1), F.dropout(y_BTHO, 0.1, self.training))
            .square()
            .mean()
        )


class PackedProjection(nn.Module):
    """Chunk, split, unbind and slices of one projection: many saved views, one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.gate = nn.Linear(16, 40)

    def forward(self, batch: int) -> Tensor:
        x_BTD = _noise(batch, 3, 7, 16)
        packed_BTD = self.qkv(x_BTD)
        q, k, v = (part.view(3, 7, 2, 8).transpose(1, 2) for part in packed_BTD.chunk(3, dim=-1))
        y_BTD = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True).transpose(1, 2).flatten(2)
        left, middle, right = self.gate(y_BTD).split((16, 8, 16), dim=-1)
        first, *_, last = middle.unbind(1)
        return (F.silu(left) * right).mean() + (first * last).mean() + packed_BTD[..., ::3].square().mean()


class ShiftedViews(nn.Module):
    """Views that start one element into their storage, at odd strides, and that cover little of what they span."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(15, 33)
        self.outer = nn.Linear(32, 15)

    def forward(self, batch: int) -> Tensor:
        x_N = _noise(batch, 8 * 15 + 1).requires_grad_()
        shifted_NI = x_N[1:].view(8, 15)
        hidden_NO = F.dropout(self.inner(shifted_NI), 0.1, self.training)
        y_NI = self.outer(hidden_NO[:, 1:]) * shifted_NI.flip(0)
        corner = hidden_NO.t()[1::5, 1::3]
        windows = hidden_NO.flatten().unfold(0, 9, 4)
        return y_NI.sigmoid().mean() + corner.square().mean() + windows.tanh().square().mean()


class Transposing(nn.Module):
    """Transposes, permutes and reshapes that copy."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(9, 9)
        self.width = nn.Linear(16, 16)

    def forward(self, batch: int) -> Tensor:
        x_BTD = _noise(batch, 3, 9, 16)
        y_BDT = F.gelu(self.mix(self.width(x_BTD).transpose(1, 2)))
        y_TBD = F.dropout(y_BDT.permute(2, 0, 1), 0.1, self.training)
        return (self.width(y_TBD.reshape(-1, 16)).view(9, 3, 16) * y_TBD).square().mean()


class Indexing(nn.Module):
    """Gathers, scatters and writes through indices and masks, some in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 16)

    def forward(self, batch: int) -> Tensor:
        draw = torch.Generator().manual_seed(batch)
        x_ND = self.inner(_noise(batch, 24, 8))
        ids_M = torch.randint(24, (40,), generator=draw)
        picked_MD = torch.tanh(x_ND[ids_M]) * x_ND.index_select(0, ids_M)
        summed_ND = torch.zeros(24, 16).index_add(0, ids_M, self.outer(picked_MD))
        summed_ND = summed_ND.scatter_add(0, ids_M[:24, None].expand(24, 16), x_ND.sigmoid())
        summed_ND = summed_ND.masked_fill(summed_ND > 2, 0.5)
        best_ND, where_ND = summed_ND.topk(4, dim=1)
        summed_ND[:, 3:7] = best_ND * x_ND.gather(1, where_ND)
        kept = summed_ND.exp()[x_ND > 0]
        return (
            summed_ND.scatter(1, where_ND, best_ND.square()).cumsum(0).mean()
            + F.dropout(kept, 0.1, self.training).mean()
        )


class UnusedBranches(nn.Module):
    """Branches that no loss needs, a part that is detached, and experts of which a batch uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.idle = nn.Linear(8, 16), nn.Linear(16, 16)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)) for _ in range(3))

    def forward(self, batch: int) -> Tensor:
        x_BD = self.trunk(_noise(batch, 6, 8))
        unused_BD = self.idle(torch.relu(x_BD)).sigmoid()
        with torch.no_grad():
            target_BD = self.idle(x_BD).tanh()
        y_BD = self.experts[batch % 3](x_BD) * unused_BD.detach()
        return F.mse_loss(y_BD, target_BD)


class Complex(nn.Module):
    """Saved views with the conjugate and the negative bit, and a spectrum."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, batch: int) -> Tensor:
        x_BD = torch.complex(_noise(batch, 5, 6), _noise(batch + 1000, 5, 6)) * self.scale
        y_BD = x_BD.conj() @ self.weight @ self.weight.mH
        product_BD = y_BD.conj() * x_BD * y_BD.conj().imag
        spectrum_BD = torch.fft.fft(F.dropout(self.scale * y_BD.real, 0.1, self.training))
        return product_BD.abs().mean() + spectrum_BD.conj().imag.square().mean() + (y_BD.mH * y_BD.mT).real.mean()


class Checkpointed(nn.Module):
    """Blocks that recompute, with and without re-entering autograd, nested in the latter form."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16)) for _ in range(3)
        )

    def forward(self, batch: int) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        first, second, third = self.blocks

        def nested(x_BD: Tensor) -> Any:
            return third(checkpoint(second, x_BD, use_reentrant=False)) * x_BD

        x_BD = _noise(batch, 6, 16).requires_grad_()
        y_BD: Any = checkpoint(first, x_BD, use_reentrant=True)
        y_BD = checkpoint(nested, y_BD.sin(), use_reentrant=False)
        return y_BD.square().mean()


ZOO: dict[str, Callable[[], nn.Module]] = {
    "gpt2": gpt2,
    "bert": bert,
    "t5": t5,
    "llama": llama,
    "llama_lora": llama_lora,
    "resnet": ResNet,
    "lstm": Lstm,
    "attention": Attention,
    "tied_weights": TiedWeights,
    "einsum": Einsum,
    "packed_projection": PackedProjection,
    "shifted_views": ShiftedViews,
    "transposing": Transposing,
    "indexing": Indexing,
    "unused_branches": UnusedBranches,
    "complex": Complex,
    "checkpointed": Checkpointed,
}
"""Builders by name; seed torch before calling one."""
