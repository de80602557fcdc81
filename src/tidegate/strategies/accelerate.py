"""Offload for a training loop that uses Accelerate."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torch import nn

from tidegate.config import OffloadConfig, Percent
from tidegate.errors import ConfigError
from tidegate.offload.session import OffloadSession, attach

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["OffloadPlugin"]

_Path: TypeAlias = str | os.PathLike[str]


@dataclass
class OffloadPlugin:
    """Offloads the activations of a model that Accelerate has prepared.

        accelerator = Accelerator()
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        session = OffloadPlugin(device_budget=0).attach(accelerator, model)

    It is an object of its own and belongs neither into `kwargs_handlers` nor into another argument of Accelerator. As
    in Accelerate's plugins, None means "not given": an argument counts before `config`, that before a TIDEGATE_*
    variable, that before the default. It needs no `accelerate launch`.

    Args:
        config: An OffloadConfig, a mapping of its fields, or the path of a TOML, JSON or YAML file.
        tiers: This and what follows: see `OffloadConfig`.

    Attributes:
        config: After construction, the OffloadConfig that results. The other fields keep what was given.

    Raises:
        ConfigError: A field cannot be meant.
    """

    config: OffloadConfig | Mapping[str, Any] | _Path | None = None
    tiers: tuple[str, ...] | list[str] | str | None = None
    device_budget: int | float | str | Percent | None = None
    host_budget: int | float | str | None = None
    disk_budget: int | float | str | Percent | None = None
    disk_paths: list[_Path] | _Path | None = None
    recompute: Literal["auto", False] | None = None
    min_bytes: int | float | str | None = None
    window: int | float | str | None = None
    io_threads: int | None = None
    direct_io: bool | Literal["auto"] | None = None
    gds: bool | Literal["auto"] | None = None
    pin_memory: bool | Literal["auto"] | None = None
    verify: bool | None = None

    def __post_init__(self) -> None:
        arguments = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "config"}
        given = {name: value for name, value in arguments.items() if value is not None}
        self.config = OffloadConfig.of(self.config).replace(**given)

    def attach(self, accelerator: Accelerator, model: nn.Module) -> OffloadSession:
        """Opens the session of a prepared model, or returns the one that is open.

        `accelerator.free_memory()`, `clear()` and `end_training()` close it, and so does `session.close()`.

        Args:
            accelerator: Has prepared the model.
            model: What `accelerator.prepare` returned.

        Raises:
            ConfigError: The model is not prepared, already offloads in another way, or has an open session with another
                config.
        """
        session = self.open(accelerator, model)
        _close_with(accelerator, session)
        return session

    def open(self, accelerator: Accelerator, model: nn.Module) -> OffloadSession:
        """As `attach`, for a session that `free_memory` and `end_training` leave open."""
        assert isinstance(self.config, OffloadConfig)
        if not isinstance(model, nn.Module):
            raise ConfigError(f"OffloadPlugin needs the prepared model, not a {type(model).__name__}")
        if not getattr(model, "_is_accelerate_prepared", False):
            raise ConfigError(
                "the accelerator has not prepared this model: attach to what accelerator.prepare(model, ...) returned"
            )
        _refuse_other_offload(accelerator)
        return attach(model, self.config, rank=accelerator.process_index)

    def to_kwargs(self) -> dict[str, Any]:
        """The fields that were given, and the config that results from them and what is outside."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}

    def __str__(self) -> str:
        # Accelerate shows this when it refuses the plugin as a kwargs handler.
        return f"{self!r} (not a kwargs handler: call plugin.attach(accelerator, model) after accelerator.prepare)"


def _refuse_other_offload(accelerator: Accelerator) -> None:
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if getattr(plugin, "activation_checkpointing_offload", False):
        raise ConfigError(
            "fsdp_activation_checkpointing_offload offloads activations by itself; switch one of the two off"
        )


def _close_with(accelerator: Accelerator, session: OffloadSession) -> None:
    """Lets this accelerator's own ways to end a training close the session."""
    sessions: weakref.WeakSet[OffloadSession] | None = vars(accelerator).get("_tidegate_sessions")
    if sessions is None:
        sessions = weakref.WeakSet()
        vars(accelerator)["_tidegate_sessions"] = sessions
        for name in ("free_memory", "end_training"):  # clear() calls free_memory()
            setattr(accelerator, name, _closing(getattr(accelerator, name), sessions))
    sessions.add(session)


def _closing(method: Callable[..., Any], sessions: weakref.WeakSet[OffloadSession]) -> Callable[..., Any]:
    @functools.wraps(method)
    def close_and_call(*args: Any, **kwargs: Any) -> Any:
        for session in list(sessions):
            session.close()
        sessions.clear()
        return method(*args, **kwargs)

    return close_and_call
