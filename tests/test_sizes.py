"""Sizes as people write them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import ConfigError
from tidegate.sizes import Percent, parse_size

UNITS = {
    "B": 1,
    "KB": 1000,
    "KiB": 2**10,
    "MB": 10**6,
    "MiB": 2**20,
    "GB": 10**9,
    "GiB": 2**30,
    "TB": 10**12,
    "TiB": 2**40,
}


@pytest.mark.parametrize(
    ("written", "nbytes"),
    [
        (8, 8),
        (0, 0),
        (8e9, 8_000_000_000),
        ("8", 8),
        ("8GiB", 8 * 2**30),
        ("8 GB", 8 * 10**9),
        ("8G", 8 * 10**9),
        ("8Gi", 8 * 2**30),
        ("1.5MiB", 3 * 2**19),
        (".5 kib", 512),
        ("1e3", 1000),
        ("+2 MB", 2_000_000),
        ("  64 MiB  ", 64 * 2**20),
        (2**53 + 1, 2**53 + 1),
        (str(2**53 + 1), 2**53 + 1),
        (np.int64(7), 7),
    ],
)
def test_bytes_are_read(written: int | float | str, nbytes: int) -> None:
    size = parse_size(written)
    assert size == nbytes
    assert type(size) is int


@given(st.integers(0, 2**20), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]), st.booleans())
def test_every_unit_in_any_case(number: int, unit: str, gap: str, lower: bool) -> None:
    text = f"{number}{gap}{unit}"
    assert parse_size(text.lower() if lower else text) == number * UNITS[unit]


@given(st.floats(0, 1))
def test_a_percentage_is_read_back_from_its_own_text(share: float) -> None:
    assert parse_size(str(Percent(share))) == Percent(share)


@pytest.mark.parametrize(("written", "share"), [("30%", 0.3), (" 12.5 % ", 0.125), ("0%", 0.0), ("100%", 1.0)])
def test_percentages_are_read(written: str, share: float) -> None:
    assert parse_size(written) == Percent(share)


def test_a_percentage_of_bytes_is_rounded_down() -> None:
    assert Percent(0.3).of(101) == 30


@pytest.mark.parametrize("written", [-1, -0.5, "-1", "-2 GiB"])
def test_negative_sizes_are_refused(written: float | str) -> None:
    with pytest.raises(ConfigError, match="negative"):
        parse_size(written)


@pytest.mark.parametrize("written", [math.nan, math.inf, -math.inf, np.float64("nan")])
def test_sizes_that_are_not_finite_are_refused(written: float) -> None:
    with pytest.raises(ConfigError, match="not finite"):
        parse_size(written)


@pytest.mark.parametrize("written", [0.3, "0.3", "1.5 B"])
def test_a_fraction_of_a_byte_is_refused_and_points_to_percentages(written: float | str) -> None:
    with pytest.raises(ConfigError, match="percentage"):
        parse_size(written)


@pytest.mark.parametrize("written", ["-1%", "100.1%", "nan%", "inf%", Percent(1.5), Percent(math.nan)])
def test_percentages_outside_0_to_100_are_refused(written: str | Percent) -> None:
    with pytest.raises(ConfigError, match="0% to 100%"):
        parse_size(written)


@pytest.mark.parametrize("written", [2**63, "9 EiB", "1e400", "1e99999999999999999999", "9" * 5000, "20000000 TB"])
def test_sizes_beyond_any_memory_are_refused(written: int | str) -> None:
    with pytest.raises(ConfigError):
        parse_size(written)


@pytest.mark.parametrize(
    "written", ["", " ", "GiB", "8 XB", "8 GiBs", "eight", "8,5GB", "0x10", "nan", "%", "a%", "1 2"]
)
def test_what_is_no_size_says_how_to_write_one(written: str) -> None:
    with pytest.raises(ConfigError, match="8GiB"):
        parse_size(written)


@pytest.mark.parametrize("written", [True, None, [1], b"1", object()])
def test_other_types_are_refused(written: object) -> None:
    with pytest.raises(ConfigError, match="is no size"):
        parse_size(written)  # type: ignore[arg-type]


@given(st.text())
def test_any_text_is_a_size_or_a_config_error(text: str) -> None:
    try:
        size = parse_size(text)
    except ConfigError:
        return
    assert isinstance(size, Percent) or size >= 0
