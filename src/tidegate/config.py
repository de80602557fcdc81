"""OffloadConfig: all that a user may say, validated once."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tidegate.errors import ConfigError, MissingExtraError

__all__ = ["OffloadConfig", "Percent", "parse_size"]

_PREFIX = "TIDEGATE_"
_RESERVED = frozenset({"TIDEGATE_CONFIG"})
_TIERS = ("host", "disk")
_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGTP", start=1)
    for base, suffix in ((1000, "B"), (1000, ""), (1024, "iB"), (1024, "i"))
}
_UNITS_FOLDED = {unit.lower(): factor for unit, factor in _UNITS.items()}
_SIZE = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_TRUE, _FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True, slots=True, order=True)
class Percent:
    """A share, as "30%" says it.

    Args:
        share: 0 to 1.
    """

    share: float

    def of(self, nbytes: int) -> int:
        """The share of `nbytes`, in bytes, rounded down."""
        return int(self.share * nbytes)

    def __str__(self) -> str:
        return f"{self.share * 100:g}%"


def parse_size(value: int | float | str | Percent) -> int | Percent:
    """Reads a size: bytes as a number, "8GiB" (2**30), "8 GB" (10**9), or "30%".

    Returns:
        Bytes, or a Percent.

    Raises:
        ConfigError: It is negative, not finite, or no size.
    """
    if isinstance(value, Percent):
        return _percent(value.share)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ConfigError(f'{value!r} is no size; give bytes or a string such as "8GiB"')
    if isinstance(value, str):
        text = value.strip()
        if text.endswith("%"):
            return _percent(_number(text[:-1], value) / 100)
        match = _SIZE.fullmatch(text)
        factor = _UNITS_FOLDED.get(match[2].lower()) if match else None
        if match is None or factor is None:
            raise ConfigError(
                f"{value!r} is no size; give bytes or a number with B, KB, KiB, MB, MiB, GB, GiB, TB or TiB"
            )
        number: float = _number(match[1], value) * factor
    else:
        number = value
    if number != number or number in (math.inf, -math.inf):
        raise ConfigError(f"{value!r} is no size: it is not finite")
    if number < 0:
        raise ConfigError(f"{value!r} is negative; sizes start at 0")
    return round(number)


def _number(text: str, value: object) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ConfigError(f'{value!r} is no size; give bytes or a string such as "8GiB" or "30%"') from None
    return int(number) if number.is_integer() else number


def _percent(share: float) -> Percent:
    if not 0 <= share <= 1:
        raise ConfigError(f"{share * 100:g}% lies outside 0% to 100%")
    return Percent(share)


_UNSET: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """What may move where.

    Every field may be given as an argument, as the environment variable TIDEGATE_<FIELD>, or in the TOML, JSON
    or YAML file that TIDEGATE_CONFIG names; in this order of precedence. None means "not given".

    Args:
        tiers: Where bytes may go, in order of preference: "host", "disk". On a CPU run the default leaves "host"
            out, since the device is host RAM already.
        device_budget: Device bytes that saved activations may take: "auto" (what measured headroom less a margin
            allows: nothing moves while all fits), bytes or "8GiB", "30%" of what a step saves, or 0 (everything
            eligible moves). On a CPU run the device is RAM.
        host_budget: Bytes of host RAM for moved activations; "auto" is half of the measured headroom.
        disk_budget: Bytes on disk over all paths; "auto" is most of the free space. "50%" is of the free space.
        disk_paths: Directories for spill files; several are striped over. Default: the temporary directory, if it
            is on a local disk.
        recompute: "auto" or False. Recomputation is not in this version, and "auto" means False.
        min_bytes: Smaller saved tensors stay on the device.
        window: Bytes in flight, each way.
        io_threads: Threads per direction and path.
        direct_io: O_DIRECT: "auto" (where the file system takes it), True or False.
        pin_memory: Page-locked host memory: "auto" (with a GPU), True or False.
        verify: Checksum every unit when it leaves and when it is back.

    Raises:
        ConfigError: A value cannot be meant.
    """

    tiers: tuple[str, ...] = _UNSET
    device_budget: int | Percent | Literal["auto"] = _UNSET
    host_budget: int | Literal["auto"] = _UNSET
    disk_budget: int | Percent | Literal["auto"] = _UNSET
    disk_paths: tuple[str, ...] = _UNSET
    recompute: Literal["auto", False] = _UNSET
    min_bytes: int = _UNSET
    window: int | Literal["auto"] = _UNSET
    io_threads: int = _UNSET
    direct_io: bool | Literal["auto"] = _UNSET
    pin_memory: bool | Literal["auto"] = _UNSET
    verify: bool = _UNSET
    given: frozenset[str] = dataclasses.field(init=False, repr=False, compare=False, default=frozenset())

    if TYPE_CHECKING:
        # What may be written; the fields above say what is read.
        def __init__(
            self,
            *,
            tiers: str | Sequence[str] | None = None,
            device_budget: int | float | str | Percent | None = None,
            host_budget: int | float | str | None = None,
            disk_budget: int | float | str | Percent | None = None,
            disk_paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
            recompute: Literal["auto", False] | None = None,
            min_bytes: int | float | str | None = None,
            window: int | float | str | None = None,
            io_threads: int | None = None,
            direct_io: bool | Literal["auto"] | None = None,
            pin_memory: bool | Literal["auto"] | None = None,
            verify: bool | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        layers = (_from_environment(), _from_config_file())
        given = set()
        for name, (default, read) in _FIELDS.items():
            value, source = getattr(self, name), name
            for layer, prefix in zip(layers, (_PREFIX, "in the file of TIDEGATE_CONFIG: "), strict=True):
                if value is None and name in layer:
                    value = layer[name]
                    source = prefix + (name.upper() if prefix == _PREFIX else name)
            if value is None:
                value = default
            else:
                given.add(name)
            try:
                object.__setattr__(self, name, read(value))
            except ConfigError as error:
                raise ConfigError(f"{source}: {error}") from None
        object.__setattr__(self, "given", frozenset(given))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> OffloadConfig:
        """Builds a config from plain data.

        Raises:
            ConfigError: An unknown key, or a value that cannot be meant.
        """
        return cls(**_known(values, "OffloadConfig"))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> OffloadConfig:
        """Builds a config from a TOML, JSON or YAML file.

        Raises:
            ConfigError: The file cannot be read, or says something that cannot be meant.
        """
        return cls.from_dict(_read_file(Path(path)))

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads back to an equal config."""
        return {name: _plain(getattr(self, name)) for name in _FIELDS}

    def replace(self, **changes: Any) -> OffloadConfig:
        """Returns a copy with some fields changed; what was given stays given."""
        kept = {name: getattr(self, name) for name in self.given}
        return type(self)(**_known(kept | changes, "OffloadConfig"))

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, ({name: getattr(self, name) for name in _FIELDS}, self.given)


def _restore(values: dict[str, Any], given: frozenset[str]) -> OffloadConfig:
    config = object.__new__(OffloadConfig)
    for name, value in values.items():
        object.__setattr__(config, name, value)
    object.__setattr__(config, "given", given)
    return config


def _plain(value: Any) -> Any:
    if isinstance(value, Percent):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


# Readers: one per field, from what a user writes to what the package uses.


def _names(value: Any) -> tuple[str, ...]:
    if isinstance(value, str | os.PathLike):
        value = (value,)
    if not isinstance(value, Sequence) or not all(isinstance(item, str | os.PathLike) for item in value):
        raise ConfigError(f"{value!r} is no list of names")
    return tuple(os.fspath(item) for item in value)


def _tiers(value: Any) -> tuple[str, ...]:
    tiers = tuple(name.strip().lower() for item in _names(value) for name in item.split(","))
    for name in tiers:
        if name not in _TIERS:
            raise ConfigError(f'unknown tier "{name}"; tiers are "host" and "disk"')
    if len(set(tiers)) != len(tiers):
        raise ConfigError(f"a tier is named twice: {', '.join(tiers)}")
    if not tiers:
        raise ConfigError('no tier is named; name "host", "disk" or both')
    return tiers


def _paths(value: Any) -> tuple[str, ...]:
    paths = tuple(os.path.abspath(os.path.expanduser(path)) for path in _names(value) if path)
    if len(set(paths)) != len(paths):
        raise ConfigError(f"a path is named twice: {', '.join(paths)}")
    return paths


def _device_budget(value: Any) -> int | Percent | str:
    if isinstance(value, str) and value.strip().lower() in ("auto", "free"):
        if value.strip().lower() == "free":
            raise ConfigError(
                '"free" needs step times that this version does not measure yet; use "auto", bytes, a percentage or 0'
            )
        return "auto"
    return parse_size(value)


def _bytes_or_auto(value: Any) -> int | str:
    size = _disk_budget(value)
    if isinstance(size, Percent):
        raise ConfigError(f"{value!r}: a percentage has no meaning here; give bytes or a size")
    return size


def _disk_budget(value: Any) -> int | Percent | str:
    return "auto" if isinstance(value, str) and value.strip().lower() == "auto" else parse_size(value)


def _bytes(value: Any) -> int:
    size = parse_size(value)
    if isinstance(size, Percent):
        raise ConfigError(f"{value!r}: a percentage has no meaning here; give bytes or a size")
    return size


def _recompute(value: Any) -> str | bool:
    if isinstance(value, str) and value.lower() in ("cheap", "blocks"):
        raise ConfigError(f'recompute="{value}" is not in this version; use "auto" or False')
    choice = _bool_or_auto(value)
    if choice is True:
        raise ConfigError('recompute=True says too little; use "auto" or False')
    return choice


def _bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise ConfigError(f"{value!r} is no truth value; use true or false")


def _bool_or_auto(value: Any) -> bool | str:
    return "auto" if isinstance(value, str) and value.strip().lower() == "auto" else _bool(value)


def _threads(value: Any) -> int:
    try:
        threads = int(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{value!r} is no number of threads") from None
    if isinstance(value, bool) or (isinstance(value, float) and value != threads) or not 1 <= threads <= 256:
        raise ConfigError(f"{value!r} is no number of threads; 1 to 256 are possible")
    return threads


_FIELDS: dict[str, tuple[Any, Any]] = {
    "tiers": (_TIERS, _tiers),
    "device_budget": ("auto", _device_budget),
    "host_budget": ("auto", _bytes_or_auto),
    "disk_budget": ("auto", _disk_budget),
    "disk_paths": ((), _paths),
    "recompute": ("auto", _recompute),
    "min_bytes": ("1MiB", _bytes),
    "window": ("auto", _bytes_or_auto),
    "io_threads": (4, _threads),
    "direct_io": ("auto", _bool_or_auto),
    "pin_memory": ("auto", _bool_or_auto),
    "verify": (False, _bool),
}


def _known(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    for name in values:
        if name not in _FIELDS:
            raise ConfigError(f"{where}: unknown key {name!r}{_nearest(str(name), _FIELDS)}")
    return dict(values)


def _nearest(name: str, names: Any) -> str:
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(sorted(names))}"


def _from_environment() -> dict[str, Any]:
    values: dict[str, Any] = {}
    names = {_PREFIX + name.upper(): name for name in _FIELDS}
    for variable, text in os.environ.items():
        if not variable.startswith(_PREFIX) or variable in _RESERVED:
            continue
        if variable not in names:
            raise ConfigError(f"environment: unknown variable {variable}{_nearest(variable, {*names, *_RESERVED})}")
        name = names[variable]
        if text.strip():
            values[name] = [part for part in re.split("[:,]", text) if part] if name == "disk_paths" else text
    return values


def _from_config_file() -> dict[str, Any]:
    path = os.environ.get("TIDEGATE_CONFIG")
    return _read_file(Path(path)) if path else {}


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
        if path.suffix in (".yaml", ".yml"):
            values = _yaml(text)
        elif path.suffix == ".json":
            values = json.loads(text)
        else:
            values = tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"config file {path}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"config file {path}: expected a table of settings")
    return _known(values, f"config file {path}")


def _yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise MissingExtraError("a YAML config file needs pyyaml: pip install pyyaml, or write TOML or JSON") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
