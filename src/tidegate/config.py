"""OffloadConfig: all that a user may say, validated once."""

# Annotations are evaluated here: jsonargparse reads a dataclass's fields, not its __init__, where they are postponed.
import dataclasses
import difflib
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeAlias

from tidegate.errors import ConfigError, MissingExtraError
from tidegate.sizes import Percent, parse_size

__all__ = ["OffloadConfig", "Percent", "parse_size"]

_PREFIX = "TIDEGATE_"
_RESERVED = frozenset({"TIDEGATE_CONFIG"})  # variables of ours that are no fields
_TIERS = ("host", "disk")
_TRUE, _FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off"})

_Path: TypeAlias = str | os.PathLike[str]


@dataclass(frozen=True, slots=True, kw_only=True, init=False)
class OffloadConfig:
    """What may move where.

    Every field may be given as an argument, as the environment variable TIDEGATE_<FIELD>, or in the TOML, JSON
    or YAML file that TIDEGATE_CONFIG names; in this order of precedence. None means "not given".

    Args:
        tiers: Where bytes may go, in order of preference: "host", "disk". On a CPU run the default leaves "host"
            out, since the device is host RAM already.
        device_budget: Device bytes that saved activations may take: "auto" (what measured headroom less a margin
            allows: nothing moves while all fits), "free" (as little as costs no time: the first steps measure, later
            ones move what their own work hides), bytes or "8GiB", "30%" of what a step saves, or 0 (everything
            eligible moves). On a CPU run the device is RAM.
        host_budget: Bytes of host RAM for moved activations; "auto" is half of the measured headroom.
        disk_budget: Bytes on disk over all paths; "auto" is most of the free space. "50%" is of the free space.
        disk_paths: Directories for spill files; several are striped over. Default: the temporary directory, if it
            is on a local disk.
        recompute: "auto" or False. Recomputation is not in this version, and "auto" means False.
        min_bytes: Smaller saved tensors stay on the device.
        window: Bytes in flight on their way out. On its way back, backward runs up to twice as many bytes ahead.
        io_threads: Threads per direction and path.
        direct_io: O_DIRECT: "auto" (where the file system takes it), True or False.
        gds: GPUDirect Storage through kvikio: "auto" (where a round trip proves it real and faster), True (kvikio even
            where it is not) or False. On a CPU run it means nothing.
        pin_memory: Page-locked host memory: "auto" (with a GPU), True or False.
        verify: Checksum every unit when it leaves and when it is back.

    Attributes:
        given: Names of the fields that an argument, a variable or a file gave.

    Raises:
        ConfigError: A value cannot be meant.
    """

    tiers: tuple[str, ...]
    device_budget: int | Percent | Literal["auto", "free"]
    host_budget: int | Literal["auto"]
    disk_budget: int | Percent | Literal["auto"]
    disk_paths: tuple[str, ...]
    recompute: Literal["auto", False]
    min_bytes: int
    window: int | Literal["auto"]
    io_threads: int
    direct_io: bool | Literal["auto"]
    gds: bool | Literal["auto"]
    pin_memory: bool | Literal["auto"]
    verify: bool
    given: frozenset[str] = dataclasses.field(repr=False, compare=False)

    def __init__(
        self,
        *,
        tiers: Sequence[str] | str | None = None,
        device_budget: int | float | str | Percent | None = None,
        host_budget: int | float | str | None = None,
        disk_budget: int | float | str | Percent | None = None,
        disk_paths: Sequence[_Path] | _Path | None = None,
        recompute: Literal["auto", False] | None = None,
        min_bytes: int | float | str | None = None,
        window: int | float | str | None = None,
        io_threads: int | None = None,
        direct_io: bool | Literal["auto"] | None = None,
        gds: bool | Literal["auto"] | None = None,
        pin_memory: bool | Literal["auto"] | None = None,
        verify: bool | None = None,
    ) -> None:
        arguments = {
            "tiers": tiers,
            "device_budget": device_budget,
            "host_budget": host_budget,
            "disk_budget": disk_budget,
            "disk_paths": disk_paths,
            "recompute": recompute,
            "min_bytes": min_bytes,
            "window": window,
            "io_threads": io_threads,
            "direct_io": direct_io,
            "gds": gds,
            "pin_memory": pin_memory,
            "verify": verify,
        }
        sources = [_Source("{}", arguments), *_outside()]
        given = set()
        for name, (default, read) in _FIELDS.items():
            source = next((source for source in sources if source.values.get(name) is not None), None)
            if source is not None:
                given.add(name)
            try:
                object.__setattr__(self, name, read(default if source is None else source.values[name]))
            except ConfigError as error:
                raise ConfigError(f"{name if source is None else source.naming(name)}: {error}") from None
        object.__setattr__(self, "given", frozenset(given))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Builds a config from plain data, such as `to_dict` makes.

        Raises:
            ConfigError: An unknown key, or a value that cannot be meant.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(f"{values!r} is no mapping of OffloadConfig's fields")
        fields = dict(values)
        given = fields.pop("given", None)
        config = cls(**_known(fields, "OffloadConfig"))
        return config if given is None else config._with_given(_names(given))

    @classmethod
    def from_file(cls, path: _Path) -> Self:
        """Builds a config from a TOML, JSON or YAML file.

        Raises:
            ConfigError: The file cannot be read, or says something that cannot be meant.
        """
        values = _read_file(Path(path))
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"config file {path}: {error}") from None

    @classmethod
    def of(cls, value: "OffloadConfig | Mapping[str, Any] | _Path | None") -> "OffloadConfig":
        """Builds a config from whatever stands for one: itself, a mapping, the path of a file, or None for the default.

        Raises:
            ConfigError: It stands for none.
        """
        if isinstance(value, OffloadConfig):
            return value
        if isinstance(value, str | os.PathLike):
            return cls.from_file(value)
        return cls.from_dict({} if value is None else value)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads back to an equal config, whatever the environment says there."""
        return {name: _plain(getattr(self, name)) for name in _FIELDS} | {"given": sorted(self.given)}

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with some fields changed; None means as if the field had not been given.

        Raises:
            ConfigError: An unknown field, or a value that cannot be meant.
        """
        values = {name: getattr(self, name) for name in _FIELDS} | _known(changes, "OffloadConfig")
        copy = type(self)(**values)
        return copy._with_given((self.given - changes.keys()) | (copy.given & changes.keys()))

    __replace__ = replace

    def _with_given(self, names: Iterable[str]) -> Self:
        """Restores what was given; only for a config that nobody else has seen yet."""
        object.__setattr__(self, "given", frozenset(_known(dict.fromkeys(names), "OffloadConfig, given")))
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self.to_dict())


def _restore(kind: type[OffloadConfig], values: dict[str, Any]) -> OffloadConfig:
    config = object.__new__(kind)
    for name, (_, read) in _FIELDS.items():
        object.__setattr__(config, name, read(values[name]))
    return config._with_given(values["given"])


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
    names = _names(value)
    for name in names:
        if not name.strip() or "\0" in name:
            raise ConfigError(f"{name!r} is no path; name a directory")
    paths = tuple(os.path.abspath(os.path.expanduser(name)) for name in names)
    if len(set(paths)) != len(paths):
        raise ConfigError(f"a path is named twice: {', '.join(paths)}")
    return paths


def _is(value: Any, word: str) -> bool:
    return isinstance(value, str) and value.strip().lower() == word


def _device_budget(value: Any) -> int | Percent | str:
    return "free" if _is(value, "free") else _size_or_auto(value)


def _size_or_auto(value: Any) -> int | Percent | str:
    return "auto" if _is(value, "auto") else parse_size(value)


def _bytes_or_auto(value: Any) -> int | str:
    return "auto" if _is(value, "auto") else _bytes(value)


def _positive_bytes_or_auto(value: Any) -> int | str:
    size = _bytes_or_auto(value)
    if size == 0:
        raise ConfigError('0 bytes in flight move nothing; give a size, or "auto"')
    return size


def _bytes(value: Any) -> int:
    size = parse_size(value)
    if isinstance(size, Percent):
        raise ConfigError(f"{str(value)!r}: a percentage has no meaning here; give bytes or a size")
    return size


def _recompute(value: Any) -> str | bool:
    if _is(value, "cheap") or _is(value, "blocks"):
        raise ConfigError(f'"{value.strip().lower()}" is not in this version; use "auto" or False')
    choice = _bool_or_auto(value)
    if choice is True:
        raise ConfigError('True says too little; use "auto" or False')
    return choice


def _bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise ConfigError(f"{value!r} is no truth value; use true or false")


def _bool_or_auto(value: Any) -> bool | str:
    return "auto" if _is(value, "auto") else _bool(value)


def _threads(value: Any) -> int:
    try:
        threads = int(value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{value!r} is no number of threads") from None
    if isinstance(value, bool) or (isinstance(value, float) and value != threads) or not 1 <= threads <= 256:
        raise ConfigError(f"{value!r} is no number of threads; 1 to 256 are possible")
    return threads


_FIELDS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "tiers": (_TIERS, _tiers),
    "device_budget": ("auto", _device_budget),
    "host_budget": ("auto", _bytes_or_auto),
    "disk_budget": ("auto", _size_or_auto),
    "disk_paths": ((), _paths),
    "recompute": ("auto", _recompute),
    "min_bytes": ("1MiB", _bytes),
    "window": ("auto", _positive_bytes_or_auto),
    "io_threads": (4, _threads),
    "direct_io": ("auto", _bool_or_auto),
    "gds": ("auto", _bool_or_auto),
    "pin_memory": ("auto", _bool_or_auto),
    "verify": (False, _bool),
}


# Sources: where values that are no arguments come from.


class _Source(NamedTuple):
    """Values by field, and how an error names a field there; "{}" stands for the name."""

    label: str
    values: Mapping[str, Any]

    def naming(self, field: str) -> str:
        return self.label.replace("{}", field.upper() if self.label.startswith(_PREFIX) else field)


def _outside() -> list[_Source]:
    path = os.environ.get("TIDEGATE_CONFIG")
    file = [_Source(f"config file {path}: {{}}", _read_file(Path(path)))] if path else []
    return [_Source(_PREFIX + "{}", _from_environment()), *file]


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
            values[name] = [part for part in re.split("[:,]", text) if part] or [""] if name == "disk_paths" else text
    return values


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
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


def _known(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    for name in values:
        if name not in _FIELDS:
            raise ConfigError(f"{where}: unknown key {name!r}{_nearest(str(name), _FIELDS)}")
    return dict(values)


def _nearest(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(sorted(names))}"
