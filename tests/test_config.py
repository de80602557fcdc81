"""OffloadConfig: what may be said, in which order it counts, and what each mistake is answered with."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate import ConfigError, OffloadConfig
from tidegate.config import Percent, parse_size

UNITS = {"": 1, "B": 1, "KB": 10**3, "KiB": 2**10, "MB": 10**6, "MiB": 2**20, "GB": 10**9, "GiB": 2**30, "TiB": 2**40}


@given(st.integers(0, 10**6), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]))
def test_sizes_are_read_in_every_unit(number: int, unit: str, space: str) -> None:
    assert parse_size(f"{number}{space}{unit}") == number * UNITS[unit]
    assert parse_size(f"{number}{space}{unit.lower()}") == number * UNITS[unit]


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_config_error(text: str) -> None:
    try:
        size = parse_size(text)
    except ConfigError:
        return
    assert isinstance(size, Percent) or size >= 0


@pytest.mark.parametrize("value", [-1, "-1GiB", "nan", "inf", float("nan"), True, None, [], "3 foo", "", "101%", "-1%"])
def test_what_is_no_size_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError):
        parse_size(value)


def test_fractions_and_percentages() -> None:
    assert parse_size("1.5MiB") == 3 * 2**19
    assert parse_size("30%") == Percent(0.3)
    assert Percent(0.3).of(1000) == 300


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("tiers", "disc", 'unknown tier "disc"'),
        ("tiers", ("disk", "disk"), "named twice"),
        ("tiers", (), "no tier"),
        ("min_bytes", -1, "negative"),
        ("host_budget", "30%", "no meaning"),
        ("window", "3 foo", "no size"),
        ("recompute", "cheap", "not in this version"),
        ("recompute", "blocks", "not in this version"),
        ("device_budget", "free", "does not measure"),
        ("io_threads", 0, "1 to 256"),
        ("io_threads", 2.5, "number of threads"),
        ("verify", "maybe", "no truth value"),
        ("disk_paths", ("/a", "/a/"), "named twice"),
        ("disk_paths", 3, "no list"),
    ],
)
def test_a_wrong_value_names_its_field_and_says_what_is_wrong(field: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        OffloadConfig(**{field: value})
    assert str(caught.value).startswith(field)


def test_unknown_keys_are_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'device_budget'"):
        OffloadConfig.from_dict({"device_buget": 0})
    with pytest.raises(TypeError):
        OffloadConfig(device_buget=0)  # type: ignore[call-arg]


def test_unknown_variables_are_answered_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_TEIRS", "disk")
    with pytest.raises(ConfigError, match="did you mean 'TIDEGATE_TIERS'"):
        OffloadConfig()


def test_argument_beats_environment_beats_file_beats_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tidegate.toml"
    file.write_text('min_bytes = "1KiB"\nwindow = "2KiB"\nio_threads = 3\n')
    monkeypatch.setenv("TIDEGATE_CONFIG", str(file))
    monkeypatch.setenv("TIDEGATE_WINDOW", "4KiB")
    monkeypatch.setenv("TIDEGATE_IO_THREADS", "5")
    config = OffloadConfig(io_threads=7)
    assert (config.io_threads, config.window, config.min_bytes, config.verify) == (7, 4096, 1024, False)
    assert config.given == {"io_threads", "window", "min_bytes"}


@pytest.mark.parametrize(
    ("text", "value"), [("True", True), ("YES", True), ("1", True), ("off", False), ("False", False)]
)
def test_booleans_in_any_case(monkeypatch: pytest.MonkeyPatch, text: str, value: bool) -> None:
    monkeypatch.setenv("TIDEGATE_VERIFY", text)
    assert OffloadConfig().verify is value


def test_lists_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_TIERS", "host,DISK")
    monkeypatch.setenv("TIDEGATE_DISK_PATHS", "/a:/b,/c")
    config = OffloadConfig()
    assert config.tiers == ("host", "disk")
    assert config.disk_paths == ("/a", "/b", "/c")


@pytest.mark.parametrize("suffix", [".toml", ".json", ".yaml"])
def test_files_of_each_kind(tmp_path: Path, suffix: str) -> None:
    values = {"tiers": ["disk"], "device_budget": "30%", "verify": True}
    file = tmp_path / f"config{suffix}"
    if suffix == ".toml":
        file.write_text('tiers = ["disk"]\ndevice_budget = "30%"\nverify = true\n')
    else:
        file.write_text(json.dumps(values))
    assert OffloadConfig.from_file(file) == OffloadConfig.from_dict(values)


@pytest.mark.parametrize("text", ["tiers = [", "unknown = 1", "[1, 2]"])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "broken.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"broken\.toml"):
        OffloadConfig.from_file(file)
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        OffloadConfig.from_file(tmp_path / "absent.toml")


def test_a_config_survives_copies_and_plain_data() -> None:
    config = OffloadConfig(tiers="disk", device_budget="30%", window="4MiB", direct_io="auto")
    assert OffloadConfig.from_dict(config.to_dict()) == config
    assert json.loads(json.dumps(config.to_dict())) == config.to_dict()
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    assert pickle.loads(pickle.dumps(config)).given == config.given
    assert config.replace(verify=True).window == config.window
    assert hash(config.replace()) == hash(config)


def test_the_config_cannot_be_edited() -> None:
    with pytest.raises(AttributeError):
        OffloadConfig().verify = True  # type: ignore[misc]
