"""What actors are sent: models once, what they learn after that, and calls that name them."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch


class Kept(NamedTuple):
    """Names something that an actor keeps: which one, and what of it."""

    place: int
    kind: str = ""
    path: str = ""


class Weights(NamedTuple):
    """What a kept module has learnt."""

    version: int
    reference: Any


class Sender:
    """Knows what actors keep, and writes calls that name it."""

    def __init__(self, put: Callable[[object], Any]) -> None:
        self._put = put
        self.references: list[Any] = []
        self._kept: list[object] = []
        self._names: dict[int, Kept] = {}
        self._marks: dict[int, tuple[Any, ...]] = {}
        self._weights: dict[int, Weights] = {}

    def keep(self, parts: Sequence[object]) -> None:
        """Have actors keep these; later ones may be made of earlier ones.

        What has a method `to_send` is written as what that gives.
        """
        for part in parts:
            if id(part) in self._names:
                continue
            index = len(self._kept)
            to_send = getattr(part, "to_send", lambda part=part: part)
            self.references.append(self._put(self.written(to_send())))
            # It is held here, so that no other object gets its id.
            self._kept.append(part)
            if isinstance(part, torch.nn.Module):
                for path, module in part.named_modules():
                    self._names.setdefault(id(module), Kept(index, "module", path))
                for path, parameter in part.named_parameters(remove_duplicate=False):
                    self._names.setdefault(id(parameter), Kept(index, "parameter", path))
                for path, buffer in part.named_buffers(remove_duplicate=False):
                    self._names.setdefault(id(buffer), Kept(index, "buffer", path))
            else:
                self._names[id(part)] = Kept(index)

    def weights(self) -> dict[int, Weights]:
        """Where actors find what kept modules have learnt; put anew where that has changed."""
        for index, module in enumerate(self._kept):
            learnt = learnt_of(module)
            if not learnt:
                continue
            # Writes through `.data` count no version up, but change the sums.
            mark = tuple((one._version, float(one.detach().double().sum())) for one in learnt)
            if self._marks.get(index) != mark:
                version = self._weights[index].version + 1 if index in self._weights else 0
                values = [one.detach().cpu() for one in learnt]
                self._weights[index] = Weights(version, self._put(values))
                self._marks[index] = mark
        return dict(self._weights)

    def written(self, value: object) -> bytes:
        """A value that an actor can read."""
        # Needed with Ray only, and installed with tensordict too.
        import cloudpickle

        names = self._names

        class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
            def persistent_id(self, one: object) -> Kept | None:
                return names.get(id(one))

        stream = io.BytesIO()
        Pickler(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
        return stream.getvalue()


class Reader(pickle.Unpickler):
    """Reads what a `Sender` of the same run wrote."""

    def __init__(self, written: bytes, kept: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(written))
        self._kept = kept

    def persistent_load(self, name: Kept) -> Any:
        one = self._kept[name.place]
        if name.kind == "module":
            return one.get_submodule(name.path)
        if name.kind == "parameter":
            return one.get_parameter(name.path)
        return one.get_buffer(name.path) if name.kind == "buffer" else one


def learnt_of(module: object) -> list[torch.nn.Parameter]:
    """What training may change of something that is kept."""
    if not isinstance(module, torch.nn.Module):
        return []
    return [one for one in module.parameters() if one.requires_grad]
