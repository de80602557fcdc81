"""The package's exceptions. Each message says what happened, why, and what to do."""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "CorruptionError",
    "InPlaceError",
    "MissingExtraError",
    "SessionClosedError",
    "TidegateError",
    "TierIOError",
]


class TidegateError(Exception):
    """Base of every error that tidegate raises itself."""


class ConfigError(TidegateError, ValueError):
    """A setting that cannot be meant: unknown key, wrong size, unusable path."""


class MissingExtraError(TidegateError, ImportError):
    """An optional package is needed; the message names the extra that brings it."""


class TierIOError(TidegateError, OSError):
    """A tier could not give bytes back. The step's gradients cannot be computed."""


class CorruptionError(TierIOError):
    """Bytes came back different from what was written: a lost write, a truncated file, a race."""


class InPlaceError(TidegateError, RuntimeError):
    """A tensor saved for backward was edited in place before backward used it."""


class SessionClosedError(TidegateError, RuntimeError):
    """The session is closed, and with it the bytes that this backward needs."""
