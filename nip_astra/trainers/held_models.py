"""How much memory the models of a run take in the process that has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

MOST_STEPS = 8
"""How deep a model may be within what a scenario has built: attributes, items of collections."""


def memory_of_models(parts: Mapping[str, object]) -> dict[str, float]:
    """Bytes of the weights that each part holds, those laid out for generation among them.

    What several parts share, a base model for instance, counts for the first of them; parts that
    hold nothing of their own are left out.

    Parameters
    ----------
    parts : Mapping[str, object]
        Agents, scorers and services, by name.
    """
    seen: set[int] = set()
    storages: set[int] = set()
    found = {}
    for name, part in parts.items():
        size = 0.0
        for tensor in _tensors_in(part, seen, MOST_STEPS):
            storage = tensor.untyped_storage()
            # Freed matrices have a storage of no size, as all of them do.
            if storage.nbytes() and storage.data_ptr() not in storages:
                storages.add(storage.data_ptr())
                size += storage.nbytes()
        if size:
            found[name] = size
    return found


def parts_with_models(instance: Any) -> dict[str, object]:
    """What a scenario has built that may hold models: agents, scorer, reward terms, services."""
    sampler = vars(instance).get("sampler")
    others = {
        "scorer": getattr(sampler, "scorer", None),
        "task": vars(instance).get("task"),
        "reward terms": vars(instance).get("reward_terms"),
        **instance.services,
    }
    return {**instance.agents, **{name: one for name, one in others.items() if one is not None}}


def _tensors_in(one: object, seen: set[int], steps: int) -> Iterator[Tensor]:
    """The tensors that an object of ours holds, by attributes and collections; each thing once."""
    if id(one) in seen or steps == 0:
        return
    if isinstance(one, Tensor):
        yield one
        return
    if isinstance(one, torch.nn.Module):
        seen.add(id(one))
        yield from one.parameters()
        yield from one.buffers()
        return
    if isinstance(one, Mapping):
        inner: list[object] = list(one.values())
    elif isinstance(one, list | tuple):
        inner = list(one)
    elif type(one).__module__.partition(".")[0] in _FOREIGN or not hasattr(one, "__dict__"):
        return
    else:
        inner = list(vars(one).values())
    seen.add(id(one))
    for value in inner:
        yield from _tensors_in(value, seen, steps - 1)


_FOREIGN = {"builtins", "torch", "tensordict", "transformers", "tokenizers", "numpy", "functools"}
"""Packages whose things hold no model of a run, or are walked by what holds them."""
