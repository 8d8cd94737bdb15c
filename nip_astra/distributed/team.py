"""The processes of one run and their communication.

The leader samples, evaluates and writes the run directory. The others take part in updates and,
while the leader works alone, answer its requests.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nip_astra.checkpoints.tensors import pack_state, unpack_state
from nip_astra.distributed.launch import (
    is_one_of_several,
    local_rank,
    num_processes,
    rank_of_process,
)
from nip_astra.errors import ConfigurationError, LostProcessError, StopRequested
from nip_astra.trust import read_variable
from nip_astra.utils.processor import split_evenly

T = TypeVar("T")
Handler = Callable[[Any], Any]
"""Handles a request of the leader; takes and returns plain values and tensors."""

_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable with gloo's network interface."""
LOST = r"(?i)gloo|nccl|connection (closed|reset)|broken pipe"
"""Pattern of the error messages of failed communication."""
_SILENCE = timedelta(days=14)
"""Timeout between connected processes, long because an evaluating leader is silent. An ended
process is noticed at once, by its closed connections."""
_MEETING = timedelta(minutes=30)
"""Maximum wait of a launcher's process for the others."""
_CONNECTING = timedelta(seconds=30)
"""Maximum time in which running forked processes connect."""


class Team:
    """The processes of a run: a single one, or those of a `ProcessTeam`.

    Attributes
    ----------
    rank, size : int
        Which process this is, of how many.
    """

    rank: int = 0
    size: int = 1

    @property
    def is_leader(self) -> bool:
        """Whether this process samples, evaluates, tracks and saves."""
        return self.rank == 0

    @property
    def can_request(self) -> bool:
        """Whether the others wait for requests."""
        return False

    def lead(self, work: Callable[[], T], handlers: Mapping[str, Handler] = {}) -> T | None:
        """Run `work` in the leader while the others handle its requests with equal `handlers`.

        The result is None in the others.

        Raises
        ------
        StopRequested
            In all processes if the leader was stopped.
        LostProcessError
            When another process has ended; in the others also if the leader failed.
        """
        return work()

    def request(self, name: str, arguments: Sequence[Any]) -> list[Any]:
        """Return the results of a handler in all processes (leader included), one argument each.

        Only while `can_request`.
        """
        raise NotImplementedError("a process that trains alone has no others")

    def broadcast(self, value: T) -> T:
        """Return the leader's value, in all processes."""
        return value

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all processes, in all processes."""
        return [value]

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors, of equal shapes in all processes, by their sums over processes."""

    def broadcast_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors, of equal shapes in all processes, by the leader's."""

    def mesh(self, device: torch.device) -> DeviceMesh:
        """Return a one-dimensional mesh of all processes, for sharding."""
        raise NotImplementedError("a process that trains alone cannot shard")

    def shard_of(self, count: int) -> range:
        """Return this process's range of `count` consecutive items."""
        return split_evenly(range(count), self.size)[self.rank]


class ProcessTeam(Team):
    """Processes connected by torch.distributed, without pickle.

    `tensors` is the group for tensors on a GPU; tensors on the CPU and plain values use gloo.
    """

    def __init__(self, tensors: dist.ProcessGroup | None = None) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._tensors = tensors
        self._handlers: Mapping[str, Handler] = {}
        self._can_request = False

    @property
    def can_request(self) -> bool:
        return self._can_request

    def lead(self, work: Callable[[], T], handlers: Mapping[str, Handler] = {}) -> T | None:
        if not self.is_leader:
            self._serve(handlers)
            return None
        self._handlers = handlers
        self._can_request = True
        try:
            result = work()
        except LostProcessError:
            # Nobody can be told.
            raise
        except BaseException as error:
            ending = {"failed": str(error)}
            if isinstance(error, StopRequested):
                ending = {"stopped": error.signal_name}
            # This process' own error is the one to report.
            with suppress(LostProcessError):
                self._broadcast_value(ending)
            raise
        finally:
            self._can_request = False
        self._broadcast_value({"done": True})
        return result

    def _serve(self, handlers: Mapping[str, Handler]) -> None:
        """Handle the leader's requests until its work is done."""
        while True:
            message = self._broadcast_value(None)
            if "done" in message:
                return
            if "stopped" in message:
                raise StopRequested(message["stopped"])
            if "failed" in message:
                raise LostProcessError(f"the leading process has failed: {message['failed']}")
            handler = handlers[message["do"]]
            argument = message["with"][self.rank]
            self._gather(handler(argument))

    def request(self, name: str, arguments: Sequence[Any]) -> list[Any]:
        # First the message: the others work while the leader runs its own handler.
        self._broadcast_value({"do": name, "with": list(arguments)})
        handler = self._handlers[name]
        return self._gather(handler(arguments[0]))

    def broadcast(self, value: T) -> T:
        leader_value: T = self._broadcast_value(value)
        return leader_value

    def all_gather(self, value: T) -> list[T]:
        packed, sizes = self._pack_padded(value)
        buffers = [torch.empty_like(packed) for _ in sizes]
        with lost_process_errors(self):
            dist.all_gather(buffers, packed)
        return [_unpack(buffer, size) for buffer, size in zip(buffers, sizes, strict=True)]

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        for group in _group_by_type(tensors):
            if len(group) == 1 and group[0].is_contiguous():
                with lost_process_errors(self):
                    dist.all_reduce(group[0], group=self._process_group(group[0]))
                continue
            # One exchange of many tensors: each has a latency.
            flat = torch.cat([tensor.reshape(-1) for tensor in group])
            with lost_process_errors(self):
                dist.all_reduce(flat, group=self._process_group(flat))
            _copy_back(flat, group)

    def broadcast_tensors(self, tensors: Sequence[Tensor]) -> None:
        for group in _group_by_type(tensors):
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in group])
            with lost_process_errors(self):
                dist.broadcast(flat, src=0, group=self._process_group(flat))
            _copy_back(flat, group)

    def mesh(self, device: torch.device) -> DeviceMesh:
        group = self._tensors if device.type == "cuda" else dist.group.WORLD
        assert group is not None
        return DeviceMesh.from_group(group, device.type)

    def _process_group(self, tensor: Tensor) -> dist.ProcessGroup | None:
        # None is the default group, of gloo.
        return None if tensor.device.type == "cpu" else self._tensors

    def _broadcast_value(self, value: Any) -> Any:
        """Send the leader's value to all others; return it."""
        packed = _pack(value) if self.is_leader else None
        # First the size: receivers need a buffer.
        size = torch.tensor([0 if packed is None else len(packed)])
        with lost_process_errors(self):
            dist.broadcast(size, src=0)
            if packed is None:
                packed = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(packed, src=0)
        return value if self.is_leader else _unpack(packed, int(size))

    def _gather(self, value: Any) -> list[Any]:
        """Send the values of all to the leader; the others get an empty list."""
        packed, sizes = self._pack_padded(value)
        buffers = [torch.empty_like(packed) for _ in sizes] if self.is_leader else None
        with lost_process_errors(self):
            dist.gather(packed, buffers, dst=0)
        if buffers is None:
            return []
        values = [value]
        for buffer, size in zip(buffers[1:], sizes[1:], strict=True):
            values.append(_unpack(buffer, size))
        return values

    def _pack_padded(self, value: Any) -> tuple[Tensor, list[int]]:
        """Return a value as bytes, padded to the longest of all processes, and the sizes of all."""
        packed = _pack(value)
        # Gathering needs equal shapes in all processes.
        sizes = [torch.zeros(1, dtype=torch.long) for _ in range(self.size)]
        with lost_process_errors(self):
            dist.all_gather(sizes, torch.tensor([len(packed)]))
        max_size = int(max(sizes))
        padded = torch.nn.functional.pad(packed, (0, max_size - len(packed)))
        return padded, [int(size) for size in sizes]


@contextmanager
def open_team(device: torch.device, store: str | None = None) -> Iterator[Team]:
    """Connect to the launcher's other processes within the block.

    Parameters
    ----------
    device : device
        On a GPU each process takes the one of its local rank and uses NCCL.
    store : str, optional
        File on a shared disk by which the processes find each other; by default the launcher's
        address and port.
    """
    if not is_one_of_several():
        yield Team()
        return
    rank, size = rank_of_process(), num_processes()
    if device.type == "cuda":
        torch.cuda.set_device(local_rank())
    method = "env://" if store is None else f"file://{Path(store).absolute()}"
    with ExitStack() as stack:
        try:
            stack.enter_context(_group(rank, size, timeout=_MEETING, init_method=method))
        except (RuntimeError, ValueError, OSError) as error:
            raise ConfigurationError(
                f"process {rank} of {size} could not connect by {method}: {error}. Start all by "
                "`torchrun --nproc-per-node N run.py ...`, or give each RANK, WORLD_SIZE and the "
                "same new file with --settings process_store=FILE."
            ) from error
        # Beside gloo, which sends plain values: NCCL has no tensors on the CPU.
        tensors = dist.new_group(backend="nccl") if device.type == "cuda" else None
        yield ProcessTeam(tensors)


@contextmanager
def team_on_this_machine(
    store: str, rank: int, size: int, watch: Callable[[], None] = lambda: None
) -> Iterator[ProcessTeam]:
    """Connect forked processes within the block, through a new file `store`.

    `watch` is called until all are connected; it raises if one has ended.
    """
    interface_before = read_variable(_INTERFACE)
    # gloo would choose the interface of the host's name, which may have no route or a firewall.
    os.environ[_INTERFACE] = "lo"
    try:
        file = dist.FileStore(store, size)  # type: ignore[attr-defined]  # torch exports it so
        # The library would wait equally long for ended and busy processes.
        file.set(f"here/{rank}", "")
        while not all(file.check([f"here/{number}"]) for number in range(size)):
            watch()
            time.sleep(0.002)
        with ExitStack() as stack:
            # For the error message only.
            forked = Team()
            forked.rank = rank
            forked.size = size
            with lost_process_errors(forked):
                stack.enter_context(_group(rank, size, timeout=_CONNECTING, store=file))
            yield ProcessTeam()
    finally:
        if interface_before is None:
            del os.environ[_INTERFACE]
        else:
            os.environ[_INTERFACE] = interface_before


@contextmanager
def _group(rank: int, size: int, **options: Any) -> Iterator[None]:
    """Join the process group within the block."""
    dist.init_process_group("gloo", rank=rank, world_size=size, **options)
    try:
        # The timeout of `init_process_group` is that of connecting.
        dist.distributed_c10d._set_pg_timeout(_SILENCE)
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def lost_process_errors(team: Team, *, only_if: str = "") -> Iterator[None]:
    """Convert failed communication within the block to LostProcessError.

    `only_if` is a regular expression of the messages of such failures.
    """
    try:
        yield
    except RuntimeError as error:
        if not re.search(only_if, str(error)):
            raise
        # Format: "[location in gloo's source] What happened. Some advice."
        description = re.sub(r"^\[\S*\]\s*", "", str(error).strip())
        first_line = description.partition("\n")[0]
        reason = first_line.split(". ")[0]
        raise LostProcessError(
            f"one of the {team.size} processes has ended or cannot be reached ({reason})."
        ) from error


def _pack(value: Any) -> Tensor:
    content = bytearray(pack_state(value))
    return torch.frombuffer(content, dtype=torch.uint8)


def _unpack(packed: Tensor, size: int) -> Any:
    return unpack_state(packed[:size].numpy().tobytes())


def _group_by_type(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group tensors by dtype and device, for concatenation."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(groups.values())


@torch.no_grad()
def _copy_back(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    pieces = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, piece in zip(tensors, pieces, strict=True):
        tensor.copy_(piece.view_as(tensor))
