"""Methods that go by several names, because they were called otherwise in other versions."""

from __future__ import annotations

from typing import Any, ClassVar


class HasAliases:
    """Base of classes whose subclasses may define a method under any of its names.

    Whichever name a subclass defines, all names call it.
    """

    _aliases: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Groups of names that mean one method."""

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
