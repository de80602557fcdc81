"""transformers.Trainer with offload: the plain training's bits, and nothing left behind however it ends."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.strategies.causal_lm import Tokens, arguments, language_model, weights
from torch import Tensor, nn
from transformers import (
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

import tidegate
from tidegate import ConfigError, OffloadConfig
from tidegate.strategies import OffloadTrainerCallback, OffloadTrainerMixin

Run = tuple[list[float], dict[str, Tensor]]


class OffloadTrainer(OffloadTrainerMixin, Trainer):
    """What a user writes."""


def with_callback(config: OffloadConfig, args: TrainingArguments, **options: Any) -> tuple[Trainer, Any]:
    callback = OffloadTrainerCallback(config)
    trainer = plain(args, **options)
    trainer.add_callback(callback)
    return trainer, callback


def with_mixin(config: OffloadConfig, args: TrainingArguments, **options: Any) -> tuple[Trainer, Any]:
    trainer = OffloadTrainer(language_model(), args, train_dataset=Tokens(), offload=config, **options)
    return trainer, trainer


def plain(args: TrainingArguments, **options: Any) -> Trainer:
    return Trainer(language_model(), args, train_dataset=Tokens(), **options)


How = Callable[..., tuple[Trainer, Any]]
both = pytest.mark.parametrize("how", [with_callback, with_mixin])


def losses(trainer: Trainer) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history for key in ("loss", "eval_loss") if key in entry]


def assert_same_run(plain: Trainer, offloaded: Trainer) -> None:
    assert isinstance(plain.model, nn.Module)
    assert isinstance(offloaded.model, nn.Module)
    assert losses(plain)
    assert losses(plain) == losses(offloaded)
    torch.testing.assert_close(weights(offloaded.model), weights(plain.model), rtol=0, atol=0)


def assert_nothing_left(trainer: Trainer, spill: Path) -> None:
    assert isinstance(trainer.model, nn.Module)
    assert list(spill.iterdir()) == []
    assert not trainer.model._forward_pre_hooks
    assert not trainer.model._forward_hooks
    assert not torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]


@both
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 4},
        {"eval_strategy": "steps", "eval_steps": 5},
        {"activation_checkpointing": True},
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}},
        {"bf16": True},
        {"max_grad_norm": 0.1},
        {"torch_compile": True, "torch_compile_backend": "aot_eager", "max_steps": 3},
    ],
    ids=lambda options: ",".join(options) or "defaults",
)
# The compiler itself looks at `.grad` of a region's inputs.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_losses_and_weights_are_the_plain_trainings_A5_A9(
    how: How, options: dict[str, Any], everything: OffloadConfig, spill: Path, tmp_path: Path
) -> None:
    more = {"eval_dataset": Tokens(8)} if "eval_strategy" in options else {}
    reference = plain(arguments(tmp_path, **options), **more)
    reference.train()
    torch._dynamo.reset()
    trainer, offload = how(everything, arguments(tmp_path, **options), **more)
    trainer.train()
    assert_same_run(reference, trainer)
    if "torch_compile" not in options or how is with_mixin:  # a callback sees only the model inside the compiled one
        assert offload.offload_stats.written["disk"] > 0
    assert_nothing_left(trainer, spill)


@both
def test_the_best_model_is_loaded_at_the_end(how: How, everything: OffloadConfig, spill: Path, tmp_path: Path) -> None:
    options = {
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "load_best_model_at_end": True,
        "max_steps": 8,
        "learning_rate": 0.3,  # so that the last model is not the best
    }
    more = {"eval_dataset": Tokens(8)}
    reference = plain(arguments(tmp_path / "plain", **options), callbacks=[EarlyStoppingCallback(2)], **more)
    reference.train()
    trainer, offload = how(
        everything, arguments(tmp_path / "ours", **options), callbacks=[EarlyStoppingCallback(2)], **more
    )
    trainer.train()
    assert_same_run(reference, trainer)
    assert offload.offload_stats.written["disk"] > 0
    assert_nothing_left(trainer, spill)


@both
def test_a_resumed_training_goes_on_as_if_never_stopped(
    how: How, everything: OffloadConfig, spill: Path, tmp_path: Path
) -> None:
    options = {"save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 2, "max_steps": 6}
    whole, offload = how(everything, arguments(tmp_path, **options))
    whole.train()
    checkpoint = tmp_path / "checkpoint-3"
    assert not [path for path in checkpoint.iterdir() if "spill" in path.name]
    for resumed, offload in (
        (plain(arguments(tmp_path, **options)), None),
        how(everything, arguments(tmp_path, **options, restore_callback_states_from_checkpoint=True)),
    ):
        resumed.train(resume_from_checkpoint=str(checkpoint))
        assert_same_run(whole, resumed)
        assert offload is None or list(spill.iterdir()) == []


def test_a_callback_is_rebuilt_from_the_state_that_a_checkpoint_holds_A6(
    everything: OffloadConfig, spill: Path, tmp_path: Path
) -> None:
    callback = OffloadTrainerCallback(everything)
    state = json.loads(json.dumps(callback.state()))
    assert OffloadTrainerCallback.from_state(state).state() == callback.state()

    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    trainer, _ = with_callback(everything, arguments(tmp_path, **options))
    trainer.train()
    resumed = plain(arguments(tmp_path, **options, restore_callback_states_from_checkpoint=True))
    resumed.add_callback(OffloadTrainerCallback(everything.replace(device_budget="1GiB")))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    (restored,) = [c for c in resumed.callback_handler.callbacks if isinstance(c, OffloadTrainerCallback)]
    assert restored.offload_stats is not None
    assert restored.offload_stats.written["disk"] > 0, "the restored budget is 0, not 1 GiB"


class Fails(TrainerCallback):
    """Raises in mid-training, as user code does."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise self.error


class FailsInForward(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        output = self.inner(*args, **kwargs)
        if self.calls == 3:
            raise ValueError
        return output


errors = pytest.mark.parametrize("error", [ValueError(), KeyboardInterrupt(), RuntimeError("out of memory")], ids=repr)


@errors
def test_an_exception_ends_the_mixins_session_at_once(
    error: BaseException, everything: OffloadConfig, spill: Path, tmp_path: Path
) -> None:
    trainer, _ = with_mixin(everything, arguments(tmp_path), callbacks=[Fails(error)])
    with pytest.raises(type(error)):
        trainer.train()
    assert_nothing_left(trainer, spill)


@errors
def test_an_exception_ends_the_callbacks_session_at_the_next_forward(
    error: BaseException, everything: OffloadConfig, spill: Path, tmp_path: Path
) -> None:
    trainer, callback = with_callback(everything, arguments(tmp_path), callbacks=[Fails(error)])
    with pytest.raises(type(error)):
        trainer.train()
    assert not torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]
    assert isinstance(trainer.model, nn.Module)
    moved = callback.offload_stats.moved
    batch = Tokens(1)[0]
    trainer.model(**{name: ids[None] for name, ids in batch.items()}).loss.backward()
    assert callback.offload_stats.moved == moved
    assert_nothing_left(trainer, spill)


def test_after_an_exception_the_callback_can_be_closed_or_trained_with_again(
    everything: OffloadConfig, spill: Path, tmp_path: Path
) -> None:
    fails = Fails(ValueError())
    trainer, callback = with_callback(everything, arguments(tmp_path, max_steps=5), callbacks=[fails])
    for _ in range(2):
        with pytest.raises(ValueError):  # noqa: PT011
            trainer.train()
    callback.close()
    assert_nothing_left(trainer, spill)
    trainer.remove_callback(fails)
    trainer.train()
    assert callback.offload_stats.written["disk"] > 0
    assert_nothing_left(trainer, spill)


@both
def test_an_exception_in_forward_leaves_no_hook(
    how: How, everything: OffloadConfig, spill: Path, tmp_path: Path
) -> None:
    trainer, offload = how(everything, arguments(tmp_path))
    assert isinstance(trainer.model, nn.Module)
    inner = trainer.model.transformer.h[1]  # type: ignore[union-attr,index]
    trainer.model.transformer.h[1] = FailsInForward(inner)  # type: ignore[union-attr,operator,index]
    with pytest.raises(ValueError):  # noqa: PT011
        trainer.train()
    assert not torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]
    if how is with_callback:
        offload.close()
    assert_nothing_left(trainer, spill)


@pytest.mark.parametrize(
    "setting",
    [
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"offload": True}},
        {"activation_checkpointing_kwargs": {"offload": True, "use_reentrant": False}},
    ],
)
@both
def test_the_trainers_own_offload_beside_ours_is_refused_A7(
    how: How, setting: dict[str, Any], everything: OffloadConfig, spill: Path, tmp_path: Path
) -> None:
    trainer, _ = how(everything, arguments(tmp_path, **setting))
    with pytest.raises(ConfigError, match="switch one of the two off"):
        trainer.train()
    assert_nothing_left(trainer, spill)


@both
def test_trl_s_flag_beside_ours_is_refused_A7(how: How, everything: OffloadConfig, tmp_path: Path) -> None:
    trainer, _ = how(everything, arguments(tmp_path))
    trainer.args.activation_offloading = True  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="activation_offloading"):
        trainer.train()


@both
def test_several_gpus_in_one_process_are_refused(
    how: How, everything: OffloadConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _ = how(everything, arguments(tmp_path))
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    with pytest.raises(ConfigError, match="accelerate launch or torchrun"):
        trainer.train()


def test_evaluation_and_prediction_alone_open_nothing(everything: OffloadConfig, spill: Path, tmp_path: Path) -> None:
    trainer, callback = with_callback(everything, arguments(tmp_path))
    trainer.evaluate(Tokens(8))  # type: ignore[arg-type]
    trainer.predict(Tokens(8))  # type: ignore[arg-type]
    assert callback.session is None
    assert list(spill.iterdir()) == []


def test_a_config_may_be_a_mapping_or_a_file(everything: OffloadConfig, tmp_path: Path) -> None:
    path = tmp_path / "offload.json"
    settings = {"tiers": ["disk"], "device_budget": 0}
    path.write_text(json.dumps(settings))
    wanted = OffloadTrainerCallback(OffloadConfig(tiers=("disk",), device_budget=0)).state()
    assert OffloadTrainerCallback(settings).state() == wanted
    assert OffloadTrainerCallback(path).state() == wanted
    with pytest.raises(ConfigError, match="unknown key"):
        OffloadTrainerCallback({"tier": "disk"})


def test_a_callback_that_trained_can_be_copied_and_pickled(everything: OffloadConfig, tmp_path: Path) -> None:
    trainer, callback = with_callback(everything, arguments(tmp_path, max_steps=2))
    trainer.train()
    for copied in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        assert copied.state() == callback.state()
        assert copied.session is None


@both
def test_a_session_opened_by_hand_is_left_open(how: How, everything: OffloadConfig, tmp_path: Path) -> None:
    trainer, offload = how(everything, arguments(tmp_path, max_steps=2))
    assert isinstance(trainer.model, nn.Module)
    with tidegate.attach(trainer.model, everything) as session:
        trainer.train()
        assert offload.session is session
        assert not session.closed
