"""Sizes as people write them: bytes, "8GiB", "30%"."""

from __future__ import annotations

import math
import operator
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import SupportsIndex

from tidegate.errors import ConfigError

__all__ = ["Percent", "format_size", "parse_size"]

_FACTORS = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgtp", start=1)
    for suffix, base in (("", 1000), ("b", 1000), ("i", 1024), ("ib", 1024))
}
_SIZE = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([a-z]*)", re.ASCII | re.IGNORECASE)
_WANTED = 'give bytes, or a string such as "8GiB" (2**30), "8GB" (10**9) or "30%"'
_MOST = 2**63 - 1
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True, order=True)
class Percent:
    """A share of something, as "30%" says it.

    Args:
        share: 0 to 1.
    """

    share: float

    def of(self, nbytes: int) -> int:
        """The share of `nbytes`, in bytes, rounded down."""
        return int(self.share * nbytes)

    def __str__(self) -> str:
        return f"{(Decimal(repr(self.share)) * 100).normalize():f}%"


def parse_size(value: SupportsIndex | float | str | Percent) -> int | Percent:
    """Reads a size: bytes as a number, "8GiB" (2**30), "8 GB" (10**9), or "30%".

    Returns:
        Bytes, or a Percent.

    Raises:
        ConfigError: It is negative, not finite, a fraction of a byte, or no size.
    """
    if isinstance(value, Percent):
        return _percent(value.share, value)
    if isinstance(value, str):
        return _parse_text(value)
    if isinstance(value, float):
        return _whole_bytes(Decimal(value), value)
    try:
        if not isinstance(value, bool):
            return _whole_bytes(operator.index(value), value)
    except TypeError:
        pass
    raise ConfigError(f"{value!r} is no size; {_WANTED}")


def format_size(nbytes: float) -> str:
    """Writes bytes with four digits and a binary unit: 1536 is "1.5 KiB"."""
    for unit in _UNITS[:-1]:
        if abs(nbytes) < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} {_UNITS[-1]}"


def _parse_text(value: str) -> int | Percent:
    text = value.strip()
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match[2].lower()) if match else None
    try:
        if text.endswith("%"):
            return _percent(float(Decimal(text[:-1]) / 100), value)
        if match is not None and factor is not None:
            nbytes = Decimal(match[1]) * factor
            return _whole_bytes(round(nbytes) if factor > 1 and abs(nbytes) < _MOST else nbytes, value)
    except ArithmeticError:  # an exponent beyond what decimals can hold, or no number at all
        pass
    raise ConfigError(f"{value!r} is no size; {_WANTED}")


def _whole_bytes(nbytes: Decimal | int, value: object) -> int:
    if not math.isfinite(nbytes):
        raise ConfigError(f"{value!r} is no size: it is not finite")
    if nbytes < 0:
        raise ConfigError(f"{value!r} is negative; sizes start at 0")
    if nbytes > _MOST:
        raise ConfigError(f"{value!r} is more than any memory or disk holds; sizes end at 8 EiB")
    if nbytes != int(nbytes):
        raise ConfigError(f'{value!r} is no whole number of bytes; a share is written as a percentage, such as "30%"')
    return int(nbytes)


def _percent(share: float, value: object) -> Percent:
    if not 0 <= share <= 1:
        raise ConfigError(f"{str(value)!r} lies outside 0% to 100%")
    return Percent(float(share))
