"""What Trainers and training steps do besides a plain fit: the run stays the one without offload, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.tuner.tuning import Tuner
from tests.strategies.models import FEATURES, SmallModel
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tidegate import OffloadConfig
from tidegate.strategies import OffloadStrategy

MakeTrainer = Callable[..., L.Trainer]

STEPS = 20


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """These models are too small for two: on a busy machine threads would wait for each other."""
    torch.set_num_threads(1)


def batches(count: int) -> DataLoader[Tensor]:
    data = torch.randn(count * 2, 5, FEATURES, generator=torch.Generator().manual_seed(1))
    return DataLoader(data, batch_size=2)  # type: ignore[arg-type]


@pytest.fixture
def fit_both(
    make_trainer: MakeTrainer, make_model: Callable[..., Any], everything: OffloadConfig, spill: Path
) -> Callable[..., tuple[L.Trainer, L.Trainer]]:
    """Fits equal models without and with offload; asserts equal bits, that bytes moved and that none is left."""

    def fit_one(how: Strategy | str, kind: type[SmallModel], loader: DataLoader[Tensor], **options: Any) -> L.Trainer:
        model = make_model(kind)
        torch.manual_seed(3)
        trainer = make_trainer(how, **options)
        trainer.fit(model, loader)
        return trainer

    def fit_both(
        kind: type[SmallModel] = SmallModel,
        *,
        count: int = STEPS,
        callbacks: Callable[[], list[Callback]] = list,
        **options: Any,
    ) -> tuple[L.Trainer, L.Trainer]:
        strategy = OffloadStrategy(offload=everything)
        plain = fit_one("auto", kind, batches(count), callbacks=callbacks(), **options)
        offloaded = fit_one(strategy, kind, batches(count), callbacks=callbacks(), **options)
        assert_same_model(plain.model, offloaded.model)
        assert plain.global_step == offloaded.global_step
        assert_moved(strategy)
        assert list(spill.iterdir()) == []
        return plain, offloaded

    return fit_both


FitBoth = Callable[..., tuple[L.Trainer, L.Trainer]]


def assert_same_model(plain: Any, offloaded: Any) -> None:
    assert plain.losses
    assert plain.losses == offloaded.losses
    torch.testing.assert_close(dict(offloaded.state_dict()), dict(plain.state_dict()), rtol=0, atol=0)


def assert_moved(strategy: OffloadStrategy) -> None:
    stats = strategy.offload_stats
    assert stats is not None
    assert stats.written["disk"] > 0
    assert stats.pending["disk"] == 0


@pytest.mark.parametrize("every", [1, 4])
def test_twenty_optimiser_steps_are_the_plain_runs_L8(every: int, fit_both: FitBoth) -> None:
    _, trainer = fit_both(count=STEPS * every, accumulate_grad_batches=every)
    assert trainer.global_step == STEPS


def test_clipping_gradients_by_value_gives_the_plain_runs_weights(fit_both: FitBoth) -> None:
    fit_both(gradient_clip_val=1e-3, gradient_clip_algorithm="value")


class Adversaries(SmallModel):
    """Two optimisers in turn, each with the other's parameters frozen; norms are clipped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Sequential(nn.Linear(FEATURES, 16), nn.LeakyReLU(), nn.Dropout(0.1), nn.Linear(16, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        maker, critic = self.optimizers()  # type: ignore[misc]
        self.toggle_optimizer(maker)
        assert not any(parameter.requires_grad for parameter in self.critic.parameters())
        self.improve(maker, nn.functional.softplus(-self.critic(self.inner(batch))).mean())
        self.untoggle_optimizer(maker)
        self.toggle_optimizer(critic)
        fakes = self.inner(batch).detach()
        judged = self.critic(fakes), self.critic(batch)
        self.improve(critic, nn.functional.softplus(judged[0]).mean() + nn.functional.softplus(-judged[1]).mean())
        self.untoggle_optimizer(critic)

    def improve(self, optimizer: Any, loss: Tensor) -> None:
        self.losses.append(loss.item())
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.inner.parameters(), lr=1e-2), torch.optim.SGD(self.critic.parameters(), lr=1e-2)


def test_two_optimisers_in_turn_give_the_plain_runs_weights(fit_both: FitBoth) -> None:
    _, trainer = fit_both(Adversaries)
    assert trainer.global_step == 2 * STEPS


def test_one_loss_for_two_optimisers_and_a_kept_graph_gives_the_plain_runs_weights(fit_both: FitBoth) -> None:
    class Shared(Adversaries):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            maker, critic = self.optimizers()  # type: ignore[misc]
            loss = self.critic(self.inner(batch)).square().mean()
            self.losses.append(loss.item())
            for optimizer in (maker, critic):
                optimizer.zero_grad()
            self.manual_backward(loss, retain_graph=True)
            self.manual_backward(loss)
            for optimizer in (maker, critic):
                optimizer.step()

    fit_both(Shared)


def test_lbfgs_may_run_its_closure_many_times_a_step(fit_both: FitBoth) -> None:
    class Searches(SmallModel):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=5)

    _, trainer = fit_both(Searches, count=4)
    assert trainer.global_step == 4
    assert len(trainer.model.losses) > 2 * trainer.global_step  # type: ignore[union-attr, arg-type]


def test_early_stopping_stops_where_the_plain_run_does(fit_both: FitBoth) -> None:
    options = {"max_epochs": 10, "limit_val_batches": 2, "check_val_every_n_epoch": 1}
    trainers = fit_both(count=4, callbacks=lambda: [EarlyStopping("val_loss", 0.1, patience=1)], **options)
    plain, offloaded = (trainer.early_stopping_callback for trainer in trainers)
    assert plain is not None
    assert offloaded is not None
    assert 1 < plain.stopped_epoch == offloaded.stopped_epoch < 9
    assert plain.best_score == offloaded.best_score


class TestResuming:
    """From checkpoints of an offloaded run, in mid-epoch."""

    class Resumes(SmallModel):
        """Keeps the state of torch's random numbers in its checkpoints, so that dropout goes on as if never stopped."""

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["random"] = torch.get_rng_state()

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.random = checkpoint["random"]

        def on_train_start(self) -> None:
            if hasattr(self, "random"):
                torch.set_rng_state(self.random)

    class Loader:
        """Goes on in mid-epoch."""

        def __init__(self) -> None:
            self.batches = list(batches(STEPS))
            self.begin = self.next = 0

        def __len__(self) -> int:
            return len(self.batches)

        def __iter__(self) -> Any:
            begin, self.begin = self.begin, 0
            for index in range(begin, len(self.batches)):
                self.next = index + 1
                yield self.batches[index]

        def state_dict(self) -> dict[str, int]:
            return {"next": self.next}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.begin = state["next"]

    @pytest.fixture
    def fit(self, make_trainer: MakeTrainer, make_model: Callable[..., Any]) -> Callable[..., Any]:
        def fit(strategy: Strategy | str, path: Path | None = None, **options: Any) -> Any:
            model = make_model(self.Resumes)
            torch.manual_seed(3)
            trainer = make_trainer(strategy, **options)
            trainer.fit(model, self.Loader(), ckpt_path=path, weights_only=False)
            assert trainer.global_step == STEPS // trainer.accumulate_grad_batches
            return model

        return fit

    @pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks:UserWarning")
    def test_in_mid_epoch_it_goes_on_as_if_never_stopped(
        self, fit: Callable[..., Any], everything: OffloadConfig, spill: Path, tmp_path: Path
    ) -> None:
        saves = ModelCheckpoint(tmp_path / "saved", "{step}", every_n_train_steps=7, save_top_k=-1)
        whole = fit(OffloadStrategy(offload=everything), callbacks=[saves], enable_checkpointing=True)
        path = tmp_path / "saved" / "step=7.ckpt"
        assert path.exists()
        for strategy in ("auto", OffloadStrategy(offload=everything)):
            resumed = fit(strategy, path)
            assert resumed.losses == whole.losses[7:]
            torch.testing.assert_close(dict(resumed.state_dict()), dict(whole.state_dict()), rtol=0, atol=0)
            assert isinstance(strategy, str) or assert_moved(strategy) is None
        assert list(spill.iterdir()) == []

    def test_in_mid_accumulation_it_goes_on_as_a_plain_run_does(
        self, fit: Callable[..., Any], everything: OffloadConfig, spill: Path, tmp_path: Path
    ) -> None:
        class SavesInMidAccumulation(Callback):
            def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
                if trainer.fit_loop.epoch_loop.batch_idx == 9:
                    trainer.save_checkpoint(tmp_path / "saved.ckpt")

        every = {"accumulate_grad_batches": 4}
        fit(OffloadStrategy(offload=everything), callbacks=[SavesInMidAccumulation()], **every)
        strategy = OffloadStrategy(offload=everything)
        plain, offloaded = (fit(how, tmp_path / "saved.ckpt", **every) for how in ("auto", strategy))
        assert len(plain.losses) == STEPS - 10
        assert_same_model(plain, offloaded)
        assert_moved(strategy)
        assert list(spill.iterdir()) == []


def test_the_learning_rate_finder_sees_the_plain_runs_losses(
    make_trainer: MakeTrainer, make_model: Callable[..., Any], everything: OffloadConfig, spill: Path
) -> None:
    class Tunable(SmallModel):
        def __init__(self) -> None:
            super().__init__()
            self.lr = 1e-3

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=self.lr)

    strategy = OffloadStrategy(offload=everything)
    found = []
    models = []
    for how in ("auto", strategy):
        model = make_model(Tunable)
        torch.manual_seed(3)
        tuner = Tuner(make_trainer(how, enable_checkpointing=True))
        finder = tuner.lr_find(model, batches(40), num_training=30)
        assert finder is not None
        found.append(finder)
        models.append(model)
    plain, offloaded = found
    assert plain.results["loss"]
    assert offloaded.results == plain.results
    assert offloaded.suggestion() == plain.suggestion() == models[1].lr
    assert_same_model(*models)
    assert_moved(strategy)
    assert list(spill.iterdir()) == []


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.back = nn.Linear(FEATURES, 32), nn.Linear(32, FEATURES)

    def forward(self, x_BTF: Tensor) -> Tensor:
        return x_BTF + self.back(nn.functional.dropout(nn.functional.gelu(self.wide(x_BTF)), 0.1, self.training))


# The compiler itself looks at `.grad` of a block's inputs.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_blocks_compiled_one_by_one_give_the_plain_runs_weights(fit_both: FitBoth) -> None:
    class Compiled(SmallModel):
        def __init__(self) -> None:
            super().__init__()
            torch._dynamo.reset()
            graphs.append(0)
            self.blocks = nn.Sequential(Block(), Block())
            for block in self.blocks:
                block.compile(backend=count)

        def loss(self, x_BTF: Tensor) -> Tensor:
            return super().loss(self.blocks(x_BTF))

    graphs: list[int] = []

    def count(graph: Any, examples: Any) -> Any:
        graphs[-1] += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, examples)

    fit_both(Compiled)
    plain, offloaded = graphs
    assert plain == offloaded > 0


@pytest.mark.gpu
def test_mixed_fp16_on_a_gpu_scales_losses_as_the_plain_run_does(fit_both: FitBoth) -> None:
    plain, offloaded = (
        trainer.precision_plugin
        for trainer in fit_both(accelerator="gpu", devices=[0], precision="16-mixed", deterministic=True)
    )
    assert plain.state_dict()
    assert offloaded.state_dict() == plain.state_dict()
