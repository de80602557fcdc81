"""Building the strategy: configuration, devices, command line, pickling. Nothing is trained here."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import SingleDeviceStrategy

import tidegate
from tidegate import ConfigError, OffloadConfig
from tidegate.strategies import OffloadDDPStrategy, OffloadMixin, OffloadStrategy

MakeTrainer = Callable[..., L.Trainer]


def test_the_name_may_be_written_in_any_case_L1(make_trainer: MakeTrainer) -> None:
    assert isinstance(make_trainer("TIDEGATE").strategy, OffloadStrategy)


def test_the_configuration_may_be_a_mapping() -> None:
    assert OffloadStrategy(offload={"tiers": ("disk",), "min_bytes": "2MiB"}).offload == OffloadConfig(
        tiers=("disk",), min_bytes="2MiB"
    )


def test_an_unknown_key_is_refused_when_the_strategy_is_built() -> None:
    with pytest.raises(ConfigError, match="tires"):
        OffloadStrategy(offload={"tires": ("disk",)})


def test_the_registered_name_reads_the_environment(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, spill: Path
) -> None:
    monkeypatch.setenv("TIDEGATE_TIERS", "disk")
    monkeypatch.setenv("TIDEGATE_DEVICE_BUDGET", "0")
    monkeypatch.setenv("TIDEGATE_DISK_PATHS", str(spill))
    strategy = make_trainer("tidegate").strategy
    assert isinstance(strategy, OffloadStrategy)
    assert strategy.offload == OffloadConfig(tiers=("disk",), device_budget=0, disk_paths=(str(spill),))


def test_the_chosen_device_becomes_the_root_device() -> None:
    strategy = OffloadStrategy()
    strategy.parallel_devices = [torch.device("cuda:1")]
    assert strategy.root_device == torch.device("cuda:1")
    assert strategy.parallel_devices == [torch.device("cuda:1")]


def test_before_a_trainer_chose_there_is_no_device() -> None:
    assert OffloadStrategy().parallel_devices == []


def test_two_devices_are_refused_and_the_way_out_is_named(make_trainer: MakeTrainer) -> None:
    with pytest.raises(ConfigError, match=r"has 2: cpu, cpu.*devices=1.*tidegate_ddp"):
        make_trainer("tidegate", devices=2)


def test_auto_on_a_host_of_several_gpus_is_refused(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CUDAAccelerator, "is_available", staticmethod(lambda: True))
    monkeypatch.setattr(CUDAAccelerator, "auto_device_count", staticmethod(lambda: 4))
    monkeypatch.setattr(CUDAAccelerator, "parse_devices", staticmethod(lambda devices: list(range(devices))))
    with pytest.raises(ConfigError, match=r"has 4: cuda:0, cuda:1.*devices=1.*tidegate_ddp"):
        make_trainer("tidegate", accelerator="gpu", devices="auto")


def test_a_chosen_gpu_reaches_the_strategy_through_the_trainer(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CUDAAccelerator, "is_available", staticmethod(lambda: True))
    monkeypatch.setattr(CUDAAccelerator, "parse_devices", staticmethod(lambda devices: devices))
    assert make_trainer("tidegate", accelerator="gpu", devices=[1]).strategy.root_device == torch.device("cuda:1")


def test_several_nodes_are_refused(make_trainer: MakeTrainer) -> None:
    with pytest.raises(ConfigError, match=r"num_nodes=2.*tidegate_ddp"):
        make_trainer("tidegate", num_nodes=2)


def test_a_device_that_the_engine_cannot_serve_is_refused() -> None:
    with pytest.raises(ConfigError, match="not on mps"):
        OffloadStrategy().parallel_devices = [torch.device("mps")]


def test_the_mixin_takes_its_own_keyword_and_passes_the_others_on(everything: OffloadConfig) -> None:
    class Mine(OffloadMixin, SingleDeviceStrategy):
        pass

    strategy = Mine("cpu", offload=everything, accelerator=CPUAccelerator())
    assert strategy.offload == everything
    assert isinstance(strategy.accelerator, CPUAccelerator)


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_a_class_path_mapping_builds_it_on_the_command_line_L2_L3(spill: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py"])
    cli = LightningCLI(
        BoringModel,
        run=False,
        seed_everything_default=False,
        args={
            "trainer": {
                "accelerator": "cpu",
                "devices": 1,
                "logger": False,
                "enable_checkpointing": False,
                "strategy": {
                    "class_path": "tidegate.strategies.OffloadStrategy",
                    "init_args": {"offload": {"tiers": ["disk"], "device_budget": 0, "disk_paths": [str(spill)]}},
                },
            }
        },
    )
    assert isinstance(cli.trainer.strategy, OffloadStrategy)
    assert cli.trainer.strategy.offload == OffloadConfig(tiers=("disk",), device_budget=0, disk_paths=(str(spill),))


def test_nothing_unpicklable_exists_before_launch(strategy: OffloadStrategy) -> None:
    assert pickle.loads(pickle.dumps(strategy)).offload == strategy.offload


def test_a_trainer_of_the_other_namespace_says_what_to_import_L10() -> None:
    pytorch_lightning = pytest.importorskip("pytorch_lightning")
    with pytest.raises(ValueError, match=r"import lightning, not pytorch_lightning"):
        pytorch_lightning.Trainer(strategy=OffloadStrategy(), accelerator="cpu", logger=False)


@pytest.mark.parametrize("kind", [OffloadStrategy, OffloadDDPStrategy])
def test_the_config_may_come_first_and_its_fields_only_inside_it(kind: Any, everything: OffloadConfig) -> None:
    assert kind(everything).offload == everything
    assert kind({"io_threads": 3}).offload.io_threads == 3
    if kind is OffloadDDPStrategy:
        with pytest.raises(ConfigError, match="device_budget: fields of OffloadConfig go into offload"):
            kind(device_budget=0)


def test_a_session_opened_by_hand_is_left_open(
    make_trainer: Any, make_model: Any, everything: OffloadConfig, strategy: OffloadStrategy
) -> None:
    model = make_model()
    with tidegate.attach(model, everything) as session:
        make_trainer(strategy).fit(model)
        assert strategy.session is session
        assert not session.closed
        assert session.stats().written["disk"] > 0
