"""A small language model from transformers and windows of random tokens for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

__all__ = ["Tokens", "arguments", "language_model", "weights"]

VOCABULARY = 64


class Tokens(Dataset[dict[str, Tensor]]):
    """The same windows every time."""

    def __init__(self, windows: int = 64, length: int = 16) -> None:
        self.ids = torch.randint(VOCABULARY, (windows, length), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def language_model() -> GPT2LMHeadModel:
    """Two layers with dropout; the same weights every time."""
    torch.manual_seed(7)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=2, use_cache=False)
    return GPT2LMHeadModel(config)


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    """Twenty quiet steps on the CPU."""
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "max_steps": 20,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 3,
    }
    settings |= changes
    if not hasattr(TrainingArguments, "activation_checkpointing"):  # before it had this name
        settings = {name.replace("activation_", "gradient_", 1): value for name, value in settings.items()}
    return TrainingArguments(**settings)


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """A copy."""
    return {name: weight.detach().clone() for name, weight in model.state_dict().items()}
