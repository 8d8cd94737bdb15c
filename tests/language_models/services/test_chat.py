"""Resources of an event loop are created again in another one."""

from __future__ import annotations

import asyncio
from itertools import count

from nip_astra.language_models.services.chat import PerLoop


def test_each_event_loop_has_its_own_resource() -> None:
    numbers = count()
    resource = PerLoop(lambda: next(numbers))

    async def get_twice() -> tuple[int, int]:
        return resource.get(), resource.get()

    assert asyncio.run(get_twice()) == (0, 0)
    assert asyncio.run(get_twice()) == (1, 1)


def test_a_resource_is_closed_in_its_own_event_loop_only() -> None:
    resource = PerLoop(lambda: "client")

    async def get_and_remove() -> list[str | None]:
        return [resource.get(), resource.remove(), resource.remove()]

    async def get() -> str:
        return resource.get()

    async def remove() -> str | None:
        return resource.remove()

    assert asyncio.run(get_and_remove()) == ["client", "client", None]
    asyncio.run(get())
    assert asyncio.run(remove()) is None
