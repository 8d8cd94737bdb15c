"""Validation of integer arguments."""

from __future__ import annotations

from numbers import Integral

from nip_astra.errors import ConfigurationError


def check_count(name: str, value: object, *, what: str) -> None:
    """Raise unless the value is an integer of at least 1.

    Parameters
    ----------
    what : str
        What the number counts, for the message.
    """
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise ConfigurationError(
            f"{name}={value!r} must be an integer of at least 1 (the number of {what})."
        )
