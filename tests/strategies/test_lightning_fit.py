"""Training under the strategy: the plain run's bits, and only training does work."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from lightning.pytorch.tuner.tuning import Tuner
from tests.strategies.models import SmallModel
from torch import Tensor

from tidegate import OffloadConfig
from tidegate.strategies import OffloadMixin, OffloadStrategy

MakeTrainer = Callable[..., L.Trainer]
MakeModel = Callable[..., SmallModel]


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.state_dict().items()}


def assert_same_run(plain: SmallModel, offloaded: SmallModel) -> None:
    assert plain.losses
    assert plain.losses == offloaded.losses
    torch.testing.assert_close(weights(offloaded), weights(plain), rtol=0, atol=0)


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_epochs": 3},
        {"accumulate_grad_batches": 4},
        {"gradient_clip_val": 0.1},
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true"},
        {"precision": "64-true"},
        {"limit_val_batches": 2, "num_sanity_val_steps": 2},
    ],
    ids=lambda options: ",".join(f"{key}={value}" for key, value in options.items()) or "defaults",
)
def test_losses_and_weights_are_the_plain_runs_L6(
    options: dict[str, Any], make_trainer: MakeTrainer, make_model: MakeModel, strategy: OffloadStrategy
) -> None:
    plain, offloaded = make_model(), make_model()
    torch.manual_seed(3)
    make_trainer("auto", **options).fit(plain)
    torch.manual_seed(3)
    make_trainer(strategy, **options).fit(offloaded)
    assert_same_run(plain, offloaded)
    assert strategy.offload_stats is not None
    assert strategy.offload_stats.written["disk"] > 0


def test_manual_optimisation_gives_the_plain_runs_weights_L7(
    make_trainer: MakeTrainer, make_model: MakeModel, strategy: OffloadStrategy
) -> None:
    class Manual(SmallModel):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizer = self.optimizers()
            assert isinstance(optimizer, LightningOptimizer)
            for _ in range(2):
                loss = self.loss(batch)
                self.losses.append(loss.item())
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()

    plain, offloaded = make_model(Manual), make_model(Manual)
    torch.manual_seed(3)
    make_trainer().fit(plain)
    torch.manual_seed(3)
    make_trainer(strategy).fit(offloaded)
    assert_same_run(plain, offloaded)


# The compiler itself looks at `.grad` of the loss that training_step returns.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_model_gives_the_plain_runs_weights(
    make_trainer: MakeTrainer, make_model: MakeModel, strategy: OffloadStrategy
) -> None:
    plain, offloaded = make_model(), make_model()
    for model, how in ((plain, "auto"), (offloaded, strategy)):
        torch.manual_seed(3)
        compiled: Any = torch.compile(model, backend="aot_eager")
        make_trainer(how).fit(compiled)
    assert_same_run(plain, offloaded)
    assert strategy.offload_stats is not None
    assert strategy.offload_stats.written["disk"] > 0


def test_what_training_step_saves_outside_forward_is_offloaded_too(
    make_trainer: MakeTrainer, strategy: OffloadStrategy
) -> None:
    class LossOnly(BoringModel):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return (batch * self.layer.weight.sum()).exp().sum()

    make_trainer(strategy, limit_train_batches=2).fit(LossOnly())
    assert strategy.offload_stats is not None
    # exp saves its result, of the batch's size: 1 x 32 float32 values a step.
    assert strategy.offload_stats.written["disk"] >= 2 * 32 * 4


def test_fit_validate_fit_opens_one_session_for_each_fit_L11(
    make_trainer: MakeTrainer, make_model: MakeModel, strategy: OffloadStrategy
) -> None:
    def fit_validate_fit(model: SmallModel, strategy: Strategy | str) -> list[object]:
        torch.manual_seed(3)
        trainer = make_trainer(strategy, limit_val_batches=2)
        sessions = []
        for epochs in (1, 2):
            trainer.fit_loop.max_epochs = epochs
            trainer.fit(model)
            sessions.append(getattr(trainer.strategy, "session", None))
            trainer.validate(model, verbose=False)
        return sessions

    plain, offloaded = make_model(), make_model()
    fit_validate_fit(plain, "auto")
    first, second = fit_validate_fit(offloaded, strategy)
    assert_same_run(plain, offloaded)
    assert first is not second


def test_setting_up_twice_attaches_once_L5_L11(
    make_trainer: MakeTrainer, make_model: MakeModel, strategy: OffloadStrategy
) -> None:
    class SetUpAgain(Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            before = strategy.session
            strategy.setup(trainer)
            assert strategy.session is before

    make_trainer(strategy, callbacks=[SetUpAgain()]).fit(make_model())
    assert strategy.session is not None


def test_one_strategy_trains_under_one_trainer_after_another(
    make_trainer: MakeTrainer, make_model: MakeModel, strategy: OffloadStrategy
) -> None:
    for _ in range(2):
        make_trainer(strategy, accelerator="auto").fit(make_model())
        assert strategy.offload_stats is not None
        assert strategy.offload_stats.written["disk"] > 0


@pytest.mark.parametrize("run", ["validate", "test", "predict"])
def test_without_training_no_session_and_no_file_exists_L4(
    run: str, make_trainer: MakeTrainer, make_model: MakeModel, strategy: OffloadStrategy, spill: Path
) -> None:
    trainer = make_trainer(strategy, limit_val_batches=1.0)
    getattr(trainer, run)(make_model())
    assert strategy.session is None
    assert list(spill.iterdir()) == []


def test_validation_inside_a_fit_moves_nothing(
    make_trainer: MakeTrainer, make_model: MakeModel, strategy: OffloadStrategy
) -> None:
    class Watch(Callback):
        def __init__(self) -> None:
            self.written: list[int] = []

        def note(self, *_: Any, **__: Any) -> None:
            assert strategy.offload_stats is not None
            self.written.append(sum(strategy.offload_stats.written.values()))

        on_validation_start = on_validation_end = note

    watch = Watch()
    make_trainer(strategy, limit_val_batches=3, num_sanity_val_steps=2, callbacks=[watch]).fit(make_model())
    sanity_start, sanity_end, start, end = watch.written
    assert sanity_start == sanity_end == 0
    assert start == end > 0


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")
def test_a_training_step_without_a_loss_leaves_nothing_behind(
    make_trainer: MakeTrainer, make_model: MakeModel, strategy: OffloadStrategy
) -> None:
    class Skips(SmallModel):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
            loss = super().training_step(batch, batch_idx)
            graphs.append(weakref.ref(loss))
            return None if batch_idx % 2 else loss

    class Watch(Callback):
        def on_train_batch_end(self, *_: Any, **__: Any) -> None:
            alive.append(sum(graph() is not None for graph in graphs))

    graphs: list[weakref.ref[Any]] = []
    alive: list[int] = []
    plain, offloaded = make_model(Skips), make_model(Skips)
    torch.manual_seed(3)
    make_trainer().fit(plain)
    graphs.clear()
    torch.manual_seed(3)
    make_trainer(strategy, callbacks=[Watch()]).fit(offloaded)
    assert_same_run(plain, offloaded)
    assert alive[1::2] == [0, 0, 0]
    assert strategy.offload_stats is not None
    assert strategy.offload_stats.dropped["disk"] > 0
    assert sum(strategy.offload_stats.pending.values()) == 0


def test_after_a_fit_the_disk_is_empty_and_the_session_closed(
    make_trainer: MakeTrainer, make_model: MakeModel, strategy: OffloadStrategy, spill: Path
) -> None:
    seen: list[Path] = []

    class Watch(Callback):
        def on_before_backward(self, *_: Any, **__: Any) -> None:
            seen.extend(files_in(spill))

    make_trainer(strategy, callbacks=[Watch()]).fit(make_model())
    assert seen
    assert list(spill.iterdir()) == []
    assert strategy.session is not None
    assert strategy.session.closed


def raise_error() -> None:
    raise ValueError("mine")


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture
def sigint_restored() -> Iterator[None]:
    """Lightning ignores SIGINT from the first one on."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell has switched it off
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.usefixtures("sigint_restored")
@pytest.mark.parametrize(("interrupt", "arrives"), [(raise_error, ValueError), (press_ctrl_c, SystemExit)])
def test_an_interrupted_fit_leaves_no_file_L14(
    interrupt: Callable[[], None],
    arrives: type[BaseException],
    make_trainer: MakeTrainer,
    make_model: MakeModel,
    strategy: OffloadStrategy,
    spill: Path,
) -> None:
    class Breaks(SmallModel):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 2:
                assert files_in(spill)
                interrupt()
            return loss

    with pytest.raises(arrives):
        make_trainer(strategy).fit(make_model(Breaks))
    assert list(spill.iterdir()) == []
    assert strategy.session is not None
    assert strategy.session.closed


def test_the_users_error_is_the_one_that_arrives_when_closing_fails_too(
    make_trainer: MakeTrainer, make_model: MakeModel, strategy: OffloadStrategy, caplog: pytest.LogCaptureFixture
) -> None:
    class Breaks(SmallModel):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
            assert strategy.session is not None
            close = strategy.session.close

            def closes_badly() -> None:
                strategy.session.close = close  # type: ignore[union-attr, method-assign]
                raise OSError("closing failed")

            strategy.session.close = closes_badly  # type: ignore[method-assign]
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        make_trainer(strategy).fit(make_model(Breaks))
    assert "Closing the offload session failed" in caplog.text
    assert strategy.session is not None
    assert strategy.session.closed


def test_a_strategy_that_trained_can_be_pickled(
    make_trainer: MakeTrainer, make_model: MakeModel, everything: OffloadConfig
) -> None:
    strategy = OffloadStrategy(offload=everything)
    make_trainer(strategy).fit(make_model())
    strategy.optimizers = []
    strategy._lightning_module = strategy.model = None
    assert pickle.loads(pickle.dumps(strategy)).session is None


def test_a_two_line_strategy_of_ones_own_trains_the_same(
    make_trainer: MakeTrainer, make_model: MakeModel, everything: OffloadConfig
) -> None:
    class Mine(OffloadMixin, SingleDeviceStrategy):
        pass

    plain, offloaded = make_model(), make_model()
    torch.manual_seed(3)
    make_trainer().fit(plain)
    strategy = Mine("cpu", offload=everything)
    torch.manual_seed(3)
    make_trainer(strategy).fit(offloaded)
    assert_same_run(plain, offloaded)
    assert strategy.offload_stats is not None
    assert strategy.offload_stats.written["disk"] > 0


def test_the_batch_size_finder_searches_with_offload_on(
    make_trainer: MakeTrainer, make_model: MakeModel, strategy: OffloadStrategy
) -> None:
    class Adjustable(SmallModel):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"batch_size": 2})

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
            assert strategy.session is not None
            assert not strategy.session.closed
            return super().training_step(batch, batch_idx)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(super().loader().dataset, batch_size=self.hparams["batch_size"])

    trainer = make_trainer(strategy, enable_checkpointing=True, callbacks=[])
    model = make_model(Adjustable)
    Tuner(trainer).scale_batch_size(model, max_trials=2, steps_per_trial=1)
    assert model.hparams["batch_size"] > 2
    assert strategy.offload_stats is not None
    assert strategy.offload_stats.written["disk"] > 0


class TestCheckpoints:
    @pytest.fixture
    def fit_and_save(self, make_trainer: MakeTrainer, make_model: MakeModel, tmp_path: Path) -> Callable[..., Path]:
        def fit_and_save(strategy: Strategy | str, name: str) -> Path:
            model = make_model()
            torch.manual_seed(3)
            trainer = make_trainer(strategy)
            trainer.fit(model)
            trainer.save_checkpoint(tmp_path / name)
            return tmp_path / name

        return fit_and_save

    def test_they_hold_what_a_plain_runs_hold(
        self, fit_and_save: Callable[..., Path], strategy: OffloadStrategy
    ) -> None:
        plain = torch.load(fit_and_save("auto", "plain"), weights_only=True)
        ours = torch.load(fit_and_save(strategy, "ours"), weights_only=True)
        assert ours.keys() == plain.keys()
        torch.testing.assert_close(ours["state_dict"], plain["state_dict"], rtol=0, atol=0)
        torch.testing.assert_close(ours["optimizer_states"], plain["optimizer_states"], rtol=0, atol=0)

    def test_they_load_where_tidegate_is_not_installed(
        self, fit_and_save: Callable[..., Path], strategy: OffloadStrategy
    ) -> None:
        path = fit_and_save(strategy, "ours")
        code = (
            "import sys; sys.modules['tidegate'] = None; import torch;"
            f"checkpoint = torch.load({str(path)!r}, weights_only=False); assert checkpoint['state_dict']"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

    @pytest.mark.parametrize("weights_only", [None, True, False])
    def test_a_run_resumes_from_them_L9(
        self,
        weights_only: bool | None,
        fit_and_save: Callable[..., Path],
        everything: OffloadConfig,
        make_trainer: MakeTrainer,
        make_model: MakeModel,
    ) -> None:
        path = fit_and_save(OffloadStrategy(offload=everything), "ours")
        resumed: list[SmallModel] = []
        for strategy in ("auto", OffloadStrategy(offload=everything)):
            model = make_model()
            torch.manual_seed(4)
            make_trainer(strategy, max_epochs=2).fit(model, ckpt_path=path, weights_only=weights_only)
            resumed.append(model)
        assert_same_run(*resumed)


@pytest.mark.gpu
def test_on_a_gpu_the_run_is_the_plain_runs(
    make_trainer: MakeTrainer, make_model: MakeModel, strategy: OffloadStrategy
) -> None:
    plain, offloaded = make_model(), make_model()
    options = {"accelerator": "gpu", "devices": [0], "deterministic": True, "max_epochs": 3}
    torch.manual_seed(3)
    make_trainer("auto", **options).fit(plain)
    torch.manual_seed(3)
    make_trainer(strategy, **options).fit(offloaded)
    assert_same_run(plain, offloaded)
    assert strategy.root_device == torch.device("cuda:0")
    assert strategy.offload_stats is not None
    assert strategy.offload_stats.written["disk"] > 0


@pytest.mark.multi_gpu
def test_the_second_gpu_is_used_when_it_is_the_chosen_one(
    make_trainer: MakeTrainer, make_model: MakeModel, strategy: OffloadStrategy
) -> None:
    make_trainer(strategy, accelerator="gpu", devices=[1]).fit(make_model())
    assert strategy.root_device == torch.device("cuda:1")
    assert strategy.offload_stats is not None
    assert strategy.offload_stats.written["disk"] > 0
