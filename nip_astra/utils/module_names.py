"""Names that torch's modules can give to their parts."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from nip_astra.errors import ConfigurationError


def check_module_names(names: Iterable[str], *, owner: str) -> None:
    """Raise ConfigurationError for a name that a `ModuleDict` cannot hold, such as `train`.

    Modules are attributes by name, beside methods such as `train`, `pop`, `type` and `values`.
    """
    empty = torch.nn.ModuleDict()
    for name in names:
        if not name or "." in name or hasattr(empty, name):
            raise ConfigurationError(
                f"{owner} has the name {name!r}, which torch's modules use themselves or cannot "
                "hold. Give another name."
            )
