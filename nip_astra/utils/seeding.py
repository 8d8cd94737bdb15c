"""Seeds derived from names, independent of call order and global state."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SeedPart = str | int


def derive_seed(*parts: SeedPart) -> int:
    """Derive a 63-bit seed from a path of names, for instance `(seed, "agent", "attacker")`.

    Parts are hashed with their types (sha256), so `1` and `"1"` differ and the result is the same
    in every process, unlike `hash()`.
    """
    text = "\x1f".join([f"{type(part).__name__}:{part}" for part in parts])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def derived_generator(*parts: SeedPart, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a torch generator seeded by `derive_seed(*parts)`."""
    import torch  # Not at the top: reports derive seeds and do without it.

    return torch.Generator(device=device).manual_seed(derive_seed(*parts))


def uniform_rows(keys: Sequence[Sequence[SeedPart]], num_columns: int) -> Tensor:
    """Draw a row of uniform numbers for each key.

    A row depends on its key alone, so sampling from it does not depend on batch size or order.
    """
    import torch

    rows = torch.empty(len(keys), num_columns)
    generator = torch.Generator()
    for row, key in zip(rows, keys, strict=True):
        row.uniform_(generator=generator.manual_seed(derive_seed(*key)))
    return rows
