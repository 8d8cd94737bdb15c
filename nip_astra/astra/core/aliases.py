"""Methods with several names, from different versions, and methods that are replaced."""

from __future__ import annotations

from typing import Any, ClassVar

from nip_astra.errors import ConfigurationError


class HasAliases:
    """Base of classes whose subclasses may define a method under any of its names.

    All names call the method under whichever name it is defined.
    """

    _aliases: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Groups of names of one method."""

    def __setattr__(self, name: str, value: Any) -> None:
        # A method that is replaced on the object is replaced under all its names.
        names = next((names for names in self._aliases if name in names), (name,))
        for alias in names:
            super().__setattr__(alias, value)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = dict(vars(cls))
        for names in cls._aliases:
            given = next((name for name in names if name in own), None)
            if given is None:
                continue
            for name in names:
                if name not in own:
                    setattr(cls, name, own[given])


def is_overridden(owner: object, method: str, base: type) -> bool:
    """Return whether an object has another method than a base class: by its class or on itself."""
    current = getattr(owner, method, None)
    return getattr(current, "__func__", current) is not getattr(base, method, None)


def one_problem(who: object, system: Any, problem: Any) -> Any:
    """Return the problem of a sampler or an algorithm, which has two argument names."""
    found = only_one(f"the problem of {type(who).__name__}", system=system, problem=problem)
    if found is None:
        raise ConfigurationError(
            f"{type(who).__name__} needs a problem. Give it first, as system or as problem."
        )
    return found


def only_one(what: str, **given: Any) -> Any:
    """Return the argument that has several names; None if it is missing.

    Raises
    ------
    ConfigurationError
        If it is given under two of them.
    """
    named = {name: value for name, value in given.items() if value is not None}
    if len(named) > 1:
        raise ConfigurationError(
            f"{what} was given as {' and '.join(named)}, which are one argument. Give "
            f"it once, for instance as {next(iter(given))}."
        )
    return next(iter(named.values()), None)
