"""Read parameter files that other versions of the package wrote."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nip_astra.errors import ConfigurationError
from nip_astra.parameters.renamed import with_new_names
from nip_astra.version import __version__

Conversion = Callable[[dict[str, Any]], dict[str, Any]]
"""Return the values of a newer file from those of an older one; may change what it is given."""

_CONVERSIONS: dict[tuple[int, int], Conversion] = {}


def register_conversion(from_version: str, function: Conversion) -> Conversion:
    """Have files of a version, and of older ones, changed into what the next version reads.

    Parameters
    ----------
    from_version : str
        The last version, `major.minor`, whose files need the change.
    function : Callable
        Takes and gives plain values. It may raise `ConfigurationError` where a file cannot be
        converted, saying why.

    Raises
    ------
    ConfigurationError
        When the version has a conversion already, or is none.
    """
    release = release_of(from_version)
    if release is None or release in _CONVERSIONS:
        what = "is no version" if release is None else "has a conversion already"
        raise ConfigurationError(
            f"a conversion of parameter files was to be registered for {from_version!r}, which "
            f"{what}. Give the last major.minor version that needs it, once."
        )
    _CONVERSIONS[release] = function
    return function


def forget_conversion(from_version: str) -> None:
    """Drop a registered conversion, if there is one."""
    _CONVERSIONS.pop(release_of(from_version) or (-1, -1), None)


def convert(values: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    """The values as the installed version reads them.

    Values without a `package_version` are taken to be of the installed version. Those of a newer
    one stay as they are: validation refuses them, together with all other faults. Names that were
    changed are noted in the log.

    Parameters
    ----------
    source : str
        Where the values come from, for messages.

    Raises
    ------
    ConfigurationError
        When a conversion cannot be done; names the file's version and the reason.
    """
    converted = dict(values)
    version = converted.get("package_version")
    release = release_of(version) if isinstance(version, str) else None
    if release is None or is_newer(str(version)):
        return converted
    converted = with_new_names(converted, source=source)
    for last, function in sorted(_CONVERSIONS.items()):
        if release > last:
            continue
        try:
            converted = function(converted)
        except (ConfigurationError, LookupError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"{source} was written by nip_astra {version} and was to be converted for "
                f"{__version__}, but that failed: {type(error).__name__}: {error}. Write it anew, "
                f"or install nip_astra {version}."
            ) from error
    return converted | {"package_version": __version__}


def is_newer(version: str) -> bool:
    """Say whether a version is of a newer major or minor release than the installed one."""
    release, installed = release_of(version), release_of(__version__)
    return release is not None and installed is not None and release > installed


def release_of(version: str) -> tuple[int, int] | None:
    """Major and minor of a version such as "0.1.0" or "1.2"; None where it is none."""
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None
