"""OffloadConfig: what may be said, where it may be said, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.config import OffloadConfig, Percent
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    import jsonargparse

FIELDS = [field.name for field in dataclasses.fields(OffloadConfig) if field.name != "given"]

SETTINGS: dict[str, Any] = {
    "tiers": ["disk", "host"],
    "device_budget": "30%",
    "host_budget": "1GiB",
    "disk_budget": "50%",
    "disk_paths": ["/a", "/b"],
    "recompute": False,
    "min_bytes": "2MiB",
    "window": "64MiB",
    "io_threads": 2,
    "direct_io": True,
    "gds": False,
    "pin_memory": False,
    "verify": True,
}
MEANT = OffloadConfig(
    tiers=("disk", "host"),
    device_budget=Percent(0.3),
    host_budget=2**30,
    disk_budget=Percent(0.5),
    disk_paths=("/a", "/b"),
    recompute=False,
    min_bytes=2 * 2**20,
    window=64 * 2**20,
    io_threads=2,
    direct_io=True,
    gds=False,
    pin_memory=False,
    verify=True,
)


def build(**settings: Any) -> OffloadConfig:
    """Past the type checker, for what it would refuse."""
    return OffloadConfig(**settings)


# Defaults


def test_defaults() -> None:
    config = OffloadConfig()
    assert config.tiers == ("host", "disk")
    assert (config.device_budget, config.host_budget, config.disk_budget) == ("auto", "auto", "auto")
    assert config.disk_paths == ()
    assert (config.recompute, config.window, config.direct_io, config.gds, config.pin_memory) == ("auto",) * 5
    assert (config.min_bytes, config.io_threads, config.verify) == (2**20, 4, False)


def test_nothing_is_given_by_default() -> None:
    assert OffloadConfig().given == frozenset()


def test_a_default_that_is_written_out_counts_as_given() -> None:
    config = OffloadConfig(tiers=("host", "disk"))
    assert config == OffloadConfig()
    assert config.given == {"tiers"}


# Values


def test_values_are_normalised() -> None:
    assert build(**SETTINGS) == MEANT


@pytest.mark.parametrize("name", ["device_budget", "host_budget", "disk_budget", "window"])
def test_auto_in_any_case(name: str) -> None:
    assert getattr(build(**{name: " AUTO "}), name) == "auto"


def test_no_bytes_is_a_budget() -> None:
    config = OffloadConfig(device_budget=0, host_budget=0, disk_budget=0, min_bytes=0)
    assert (config.device_budget, config.host_budget, config.disk_budget, config.min_bytes) == (0, 0, 0, 0)


@pytest.mark.parametrize("tiers", ["disk", ["disk"], ("Disk",), " disk "])
def test_one_tier_may_be_written_without_a_list(tiers: Any) -> None:
    assert OffloadConfig(tiers=tiers).tiers == ("disk",)


def test_paths_become_absolute_strings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    config = OffloadConfig(disk_paths=[tmp_path / "a", "b", "~/c"])
    assert config.disk_paths == (str(tmp_path / "a"), str(tmp_path / "b"), "/home/me/c")


def test_one_path_may_be_written_without_a_list() -> None:
    assert OffloadConfig(disk_paths=Path("/spill")).disk_paths == ("/spill",)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("True", True),
        ("yes", True),
        ("ON", True),
        (1, True),
        ("False", False),
        ("No", False),
        ("off", False),
        (0, False),
    ],
)
@pytest.mark.parametrize("name", ["direct_io", "gds", "pin_memory", "verify"])
def test_booleans_in_any_case(name: str, written: Any, meant: bool) -> None:
    assert getattr(build(**{name: written}), name) is meant


# Refused


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("tiers", "tape", 'unknown tier "tape"'),
        ("tiers", (), "no tier is named"),
        ("tiers", ["disk", "Disk"], "named twice"),
        ("tiers", 3, "no list of names"),
        ("tiers", [1], "no list of names"),
        ("device_budget", -1, "negative"),
        ("device_budget", math.nan, "not finite"),
        ("device_budget", 0.3, "percentage"),
        ("device_budget", "130%", "outside 0% to 100%"),
        ("host_budget", "-1GiB", "negative"),
        ("host_budget", "50%", "percentage has no meaning"),
        ("disk_budget", "lots", "is no size"),
        ("disk_paths", ["/a", "/b/../a"], "named twice"),
        ("disk_paths", "", "is no path"),
        ("disk_paths", ["/a", " "], "is no path"),
        ("disk_paths", "a\0b", "is no path"),
        ("disk_paths", b"/a", "no list of names"),
        ("recompute", "cheap", "not in this version"),
        ("recompute", "Blocks", "not in this version"),
        ("recompute", True, "too little"),
        ("recompute", "some", "no truth value"),
        ("min_bytes", "auto", "is no size"),
        ("min_bytes", "1%", "percentage has no meaning"),
        ("window", 0, "move nothing"),
        ("window", "5%", "percentage has no meaning"),
        ("io_threads", 0, "1 to 256"),
        ("io_threads", 257, "1 to 256"),
        ("io_threads", 1.5, "1 to 256"),
        ("io_threads", True, "1 to 256"),
        ("io_threads", math.inf, "no number of threads"),
        ("io_threads", "many", "no number of threads"),
        ("direct_io", "maybe", "no truth value"),
        ("gds", "real", "no truth value"),
        ("pin_memory", 2, "no truth value"),
        ("verify", "auto", "no truth value"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_by_field(name: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: ") as caught:
        build(**{name: value})
    assert words in str(caught.value)


def test_config_errors_are_value_errors() -> None:
    with pytest.raises(ValueError, match="min_bytes"):
        OffloadConfig(min_bytes="much")


@given(
    st.sampled_from(FIELDS), st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.text())
)
def test_any_value_makes_a_config_or_a_config_error(name: str, value: Any) -> None:
    try:
        config = build(**{name: value})
    except ConfigError:
        return
    assert OffloadConfig.from_dict(config.to_dict()) == config


# The environment


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_has_a_twin_in_the_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value = SETTINGS[name]
    monkeypatch.setenv(f"TIDEGATE_{name.upper()}", ",".join(value) if isinstance(value, list) else str(value))
    config = OffloadConfig()
    assert getattr(config, name) == getattr(MEANT, name)
    assert config.given == {name}


@pytest.mark.parametrize("text", ["/a:/b", "/a,/b", "/a:/b:"])
def test_paths_in_the_environment_are_separated_by_colons_or_commas(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_DISK_PATHS", text)
    assert OffloadConfig().disk_paths == ("/a", "/b")


def test_an_empty_variable_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_WINDOW", " ")
    assert OffloadConfig().given == frozenset()


def test_an_error_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_MIN_BYTES", "-5")
    with pytest.raises(ConfigError, match=r"^TIDEGATE_MIN_BYTES: '-5' is negative"):
        OffloadConfig()


def test_an_unknown_variable_is_refused_with_the_nearest_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_TIER", "disk")
    with pytest.raises(ConfigError, match="TIDEGATE_TIER; did you mean 'TIDEGATE_TIERS'"):
        OffloadConfig()


# Files


TOML = """
tiers = ["disk", "host"]
device_budget = "30%"
host_budget = "1GiB"
disk_budget = "50%"
disk_paths = ["/a", "/b"]
recompute = false
min_bytes = "2MiB"
window = "64MiB"
io_threads = 2
direct_io = true
gds = false
pin_memory = false
verify = true
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("offload.toml", TOML),
        ("offload.json", json.dumps(SETTINGS)),
        ("offload.yaml", json.dumps(SETTINGS)),
        ("offload.yml", "\n".join(f"{name}: {json.dumps(value)}" for name, value in SETTINGS.items())),
    ],
)
def test_files_are_toml_json_or_yaml(name: str, text: str, tmp_path: Path) -> None:
    assert OffloadConfig.from_file(write(tmp_path / name, text)) == MEANT


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.toml", "window = ", "Invalid value"),
        ("a.json", "{", "Expecting"),
        ("a.yaml", "window: [", "flow"),
        ("a.yaml", "- window", "expected a table"),
        ("a.toml", "windows = 1", "did you mean 'window'"),
        ("a.toml", "window = -1", "negative"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(name: str, text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.from_file(write(tmp_path / name, text))
    assert words in str(caught.value)


def test_a_missing_file_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_CONFIG", str(tmp_path / "absent.toml"))
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        OffloadConfig()


def test_the_file_of_the_environment_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_CONFIG", str(write(tmp_path / "offload.toml", TOML)))
    assert OffloadConfig() == MEANT


def test_an_error_names_the_file_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "offload.toml", "io_threads = 0")
    monkeypatch.setenv("TIDEGATE_CONFIG", str(path))
    with pytest.raises(ConfigError, match=f"^config file {path}: io_threads: 0 is no number"):
        OffloadConfig()


def test_argument_before_environment_before_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "offload.toml", "window = 1\nmin_bytes = 1\nio_threads = 1\n")
    monkeypatch.setenv("TIDEGATE_CONFIG", str(file))
    monkeypatch.setenv("TIDEGATE_WINDOW", "2")
    monkeypatch.setenv("TIDEGATE_MIN_BYTES", "2")
    config = OffloadConfig(window=3)
    assert (config.window, config.min_bytes, config.io_threads) == (3, 2, 1)


def test_an_argument_of_none_leaves_the_word_to_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_WINDOW", "2")
    assert OffloadConfig(window=None).window == 2


# Plain data and copies


def test_an_unknown_key_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="unknown key 'disk_path'; did you mean 'disk_paths'"):
        OffloadConfig.from_dict({"disk_path": "/a"})


def test_an_unknown_key_that_is_near_nothing_lists_what_is_known() -> None:
    with pytest.raises(ConfigError, match="known are device_budget, "):
        OffloadConfig.from_dict({"zzz": 1})


def test_plain_data_is_read_back_through_json() -> None:
    again = OffloadConfig.from_dict(json.loads(json.dumps(MEANT.to_dict())))
    assert again == MEANT
    assert again.given == MEANT.given


def test_plain_data_keeps_apart_what_was_given() -> None:
    config = OffloadConfig.from_dict(OffloadConfig(window=5).to_dict())
    assert config.given == {"window"}


def test_plain_data_holds_its_own_against_the_environment_it_is_read_in(monkeypatch: pytest.MonkeyPatch) -> None:
    config = OffloadConfig(window=5)
    monkeypatch.setenv("TIDEGATE_IO_THREADS", "9")
    assert OffloadConfig.from_dict(config.to_dict()) == config


def test_replace_changes_one_field_and_keeps_the_others() -> None:
    changed = MEANT.replace(window="1MiB")
    assert changed.window == 2**20
    assert changed.replace(window="64MiB") == MEANT


def test_replace_adds_to_what_was_given() -> None:
    assert OffloadConfig(tiers="disk").replace(window=5).given == {"tiers", "window"}


def test_replace_by_none_takes_back_what_was_given() -> None:
    config = OffloadConfig(tiers="disk").replace(tiers=None)
    assert (config.tiers, config.given) == (("host", "disk"), frozenset())


def test_replace_refuses_unknown_fields() -> None:
    with pytest.raises(ConfigError, match="unknown key 'windows'"):
        MEANT.replace(windows=1)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda config: pickle.loads(pickle.dumps(config))])
def test_copies_are_equal_whatever_the_environment_says_by_then(
    duplicate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = OffloadConfig(tiers="disk", device_budget="30%")
    monkeypatch.setenv("TIDEGATE_WINDOW", "7")
    again = duplicate(config)
    assert again == config
    assert again.given == config.given


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        MEANT.window = 1  # type: ignore[misc]


def test_equal_configs_hash_equal() -> None:
    assert hash(build(**SETTINGS)) == hash(MEANT)


# Command lines


@pytest.fixture
def parser() -> jsonargparse.ArgumentParser:
    module = pytest.importorskip("jsonargparse", reason="jsonargparse is not installed")
    parser: jsonargparse.ArgumentParser = module.ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_argument("--offload", type=OffloadConfig)
    return parser


def test_jsonargparse_builds_it_from_yaml(parser: jsonargparse.ArgumentParser, tmp_path: Path) -> None:
    file = write(
        tmp_path / "train.yaml", "offload:\n" + "".join(f"  {k}: {json.dumps(v)}\n" for k, v in SETTINGS.items())
    )
    config = parser.instantiate(parser.parse_args([f"--config={file}"])).offload
    assert config == MEANT
    assert config.given == set(FIELDS)


def test_jsonargparse_builds_it_from_arguments(parser: jsonargparse.ArgumentParser) -> None:
    arguments = parser.parse_args(["--offload.tiers=disk", "--offload.device_budget=30%", "--offload.window=1GiB"])
    config = parser.instantiate(arguments).offload
    assert config == OffloadConfig(tiers="disk", device_budget="30%", window="1GiB")
    assert config.given == {"tiers", "device_budget", "window"}
