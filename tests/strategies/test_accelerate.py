"""Accelerate with offload: the plain loop's bits, and Accelerate's own ways to end a training close the session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from tests.strategies.causal_lm import Tokens, language_model, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tidegate import ConfigError, OffloadConfig, OffloadSession
from tidegate.strategies import OffloadPlugin


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Accelerate's state is one for the process, and the first wins."""

    def reset() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        PartialState._reset_state()

    reset()
    yield
    reset()


@dataclass
class Run:
    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    session: OffloadSession | None = None


def train(plugin: OffloadPlugin | None, *, steps: int = 20, every: int = 1, **options: Any) -> Run:
    """A loop as Accelerate's documentation writes it."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=every, **options)
    model: nn.Module = language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Tokens(steps * every * 4), batch_size=4)  # type: ignore[type-var]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    run = Run(session=None if plugin is None else plugin.attach(accelerator, model))
    torch.manual_seed(3)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            run.losses.append(loss.item())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    run.weights = weights(accelerator.unwrap_model(model))
    accelerator.end_training()
    return run


@pytest.mark.parametrize(
    "options",
    [{}, {"every": 4}, {"mixed_precision": "bf16"}, {"dynamo_backend": "aot_eager", "steps": 3}],
    ids=lambda options: ",".join(options) or "defaults",
)
# The compiler itself looks at `.grad` of a region's inputs.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_losses_and_weights_are_the_plain_loops(
    options: dict[str, Any], everything: OffloadConfig, spill: Path
) -> None:
    plain = train(None, **options)
    AcceleratorState._reset_state(reset_partial_state=True)
    torch._dynamo.reset()
    offloaded = train(OffloadPlugin(everything), **options)
    assert plain.losses
    assert plain.losses == offloaded.losses
    torch.testing.assert_close(offloaded.weights, plain.weights, rtol=0, atol=0)
    assert offloaded.session is not None
    assert offloaded.session.closed
    assert offloaded.session.stats().written["disk"] > 0
    assert list(spill.iterdir()) == []


def prepared() -> tuple[Accelerator, nn.Module, torch.optim.Optimizer]:
    accelerator = Accelerator(cpu=True)
    model = language_model()
    prepared_model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return accelerator, prepared_model, optimizer


def step(accelerator: Accelerator, model: nn.Module) -> None:
    batch = Tokens(4).ids
    accelerator.backward(model(input_ids=batch, labels=batch).loss)


@pytest.mark.parametrize("end", ["free_memory", "clear", "end_training"])
def test_accelerates_own_end_closes_the_session(end: str, everything: OffloadConfig, spill: Path) -> None:
    accelerator, model, _ = prepared()
    session = OffloadPlugin(everything).attach(accelerator, model)
    step(accelerator, model)
    assert list(spill.iterdir())
    getattr(accelerator, end)()
    assert session.closed
    assert list(spill.iterdir()) == []
    assert not model._forward_pre_hooks
    if end != "end_training":
        again = OffloadPlugin(everything).attach(accelerator, accelerator.prepare(model))
        step(accelerator, model)
        assert again.stats().moved > 0
        getattr(accelerator, end)()
        assert again.closed


def test_free_memory_still_gives_its_objects_back(everything: OffloadConfig) -> None:
    accelerator, model, optimizer = prepared()
    OffloadPlugin(everything).attach(accelerator, model)
    assert accelerator.free_memory(model, optimizer) == [None, None]


def test_the_model_keeps_its_forward_and_unwraps_as_before_A1(everything: OffloadConfig) -> None:
    accelerator = Accelerator(cpu=True)
    bare = language_model()
    model = accelerator.prepare(bare)
    forward = model.forward
    with OffloadPlugin(everything).attach(accelerator, model):
        assert model.forward == forward
        assert not hasattr(model, "_hf_hook")
        assert accelerator.unwrap_model(model) is bare
        step(accelerator, model)


def test_attaching_twice_gives_the_same_session(everything: OffloadConfig) -> None:
    accelerator, model, _ = prepared()
    plugin = OffloadPlugin(everything)
    session = plugin.attach(accelerator, model)
    assert plugin.attach(accelerator, model) is session
    assert OffloadPlugin(everything).attach(accelerator, accelerator.prepare(model)) is session
    assert len(model._forward_pre_hooks) == 1
    with pytest.raises(ConfigError, match="another config"):
        OffloadPlugin(everything, min_bytes="2MiB").attach(accelerator, model)
    accelerator.free_memory()


def test_saved_states_hold_nothing_of_ours_and_load_A4(everything: OffloadConfig, tmp_path: Path) -> None:
    accelerator, model, _ = prepared()
    accelerator.save_state(str(tmp_path / "plain"))
    plain = weights(model)
    session = OffloadPlugin(everything).attach(accelerator, model)
    step(accelerator, model)
    accelerator.save_state(str(tmp_path / "ours"))

    def names(folder: str) -> set[str]:
        return {path.name for path in (tmp_path / folder).iterdir()}

    assert names("ours") == names("plain")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(str(tmp_path / "ours"))
    torch.testing.assert_close(weights(model), plain, rtol=0, atol=0)
    step(accelerator, model)
    assert session.stats().steps == 2
    accelerator.free_memory()


def test_as_a_kwargs_handler_it_is_refused_and_the_right_way_is_named(everything: OffloadConfig) -> None:
    with pytest.raises((AssertionError, KeyError), match=r"plugin\.attach\(accelerator, model\)"):
        Accelerator(cpu=True, kwargs_handlers=[OffloadPlugin(everything)])  # type: ignore[list-item]


def test_a_model_that_was_not_prepared_is_refused(everything: OffloadConfig) -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ConfigError, match="has not prepared"):
        OffloadPlugin(everything).attach(accelerator, language_model())
    with pytest.raises(ConfigError, match="prepared model, not a str"):
        OffloadPlugin(everything).attach(accelerator, "model")  # type: ignore[arg-type]


def test_fsdps_own_offload_beside_ours_is_refused_A7(everything: OffloadConfig) -> None:
    _, model, _ = prepared()
    state = SimpleNamespace(fsdp_plugin=SimpleNamespace(activation_checkpointing_offload=True))
    fsdp: Any = SimpleNamespace(state=state, process_index=0)
    with pytest.raises(ConfigError, match="switch one of the two off"):
        OffloadPlugin(everything).attach(fsdp, model)


class TestWhatCounts:
    """Argument, then config, then environment, then default; as in Accelerate's plugins."""

    def test_without_environment_and_arguments_it_is_the_default_A2(self) -> None:
        assert OffloadPlugin().config == OffloadConfig()
        assert OffloadPlugin().to_kwargs() == {"config": OffloadConfig()}

    @pytest.mark.parametrize("truth", ["1", "true", "True", "YES", "on"])
    def test_environment(self, truth: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TIDEGATE_VERIFY", truth)
        monkeypatch.setenv("TIDEGATE_DEVICE_BUDGET", "2GiB")
        config = OffloadPlugin(device_budget="1GiB").config
        assert isinstance(config, OffloadConfig)
        assert config.verify is True
        assert config.device_budget == 2**30

    @pytest.mark.parametrize("given", [OffloadConfig, dict])
    def test_an_argument_counts_before_the_config(self, given: Callable[..., Any]) -> None:
        config = OffloadPlugin(given(min_bytes="2MiB", io_threads=2), io_threads=3).config
        assert config == OffloadConfig(min_bytes="2MiB", io_threads=3)

    def test_a_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "offload.toml"
        path.write_text('min_bytes = "3MiB"\ntiers = ["disk"]\n')
        wanted = OffloadConfig(min_bytes="3MiB", tiers=("disk",))
        assert OffloadPlugin(path).config == wanted
        monkeypatch.setenv("TIDEGATE_CONFIG", str(path))
        assert OffloadPlugin().config == wanted

    def test_nonsense(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ConfigError, match="tiers"):
            OffloadPlugin(tiers="tape")
        monkeypatch.setenv("TIDEGATE_VERIFY", "perhaps")
        with pytest.raises(ConfigError, match="TIDEGATE_VERIFY"):
            OffloadPlugin()

    def test_every_field_of_the_config_is_a_field_here(self) -> None:
        names = {name for name in OffloadConfig.__dataclass_fields__ if name != "given"}
        assert names | {"config"} == set(OffloadPlugin.__dataclass_fields__)
