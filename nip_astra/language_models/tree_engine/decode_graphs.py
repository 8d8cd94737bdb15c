"""Decoding steps of fixed shapes, replayed by a GPU as one captured graph.

A step of a small model consists of hundreds of short kernels, which take longer to launch than to
run. A CUDA graph launches all together, but always uses the same memory: keys and values of a level
are copied into padded buffers of a few sizes.

Shape suffixes: `R` row, padding included, `L` key position, `Y` layer, `K` key-value head,
`G` query heads of one key-value head, `D` head dimension, `X` hidden unit, `V` vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from nip_astra.errors import ConfigurationError, reason_of
from nip_astra.language_models.tree_engine.decoder import Decoder
from nip_astra.language_models.tree_engine.kv_cache import Block, KeyValueTree
from nip_astra.language_models.tree_engine.weights import Weights

logger = logging.getLogger(__name__)

DecodeGraphs = Literal["auto", "never", "always"]
Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Returns a function that repeats the work of a function, on the same memory."""

SMALLEST_ROWS = 4
SMALLEST_LENGTH = 128
MEMORY_SHARE = 0.25
"""Maximum share of a GPU for keys and values of all sizes of a model.

Beyond it the least recently used size is dropped; a level that needs more by itself is decoded over
the tree's own blocks. On an H200 a step of 256 rows of 580 tokens and 1.1 billion weights took
5.5 ms as a graph and 7.9 ms without.
"""
NUM_WARM_UPS = 2


def capture_cuda_graph(function: Callable[[], None]) -> Callable[[], None]:
    """Capture a function's work on the GPU, after warm-up runs."""
    # As torch's guide to CUDA graphs requires: libraries that initialise themselves on first use
    # must have done so before a capture, on another stream. torch leaves it without types.
    warm_up_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    warm_up_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up_stream):
        for _ in range(NUM_WARM_UPS):
            function()
    torch.cuda.current_stream().wait_stream(warm_up_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    replay: Callable[[], None] = graph.replay
    return replay


def max_bytes(device: torch.device) -> int:
    """Return the maximum memory of graphs on a device."""
    if device.type != "cuda":
        return 4 << 30
    return int(MEMORY_SHARE * torch.cuda.get_device_properties(device).total_memory)


def bucket(count: int, smallest: int) -> int:
    """Return the next of `smallest` times 1, 1.5, 2, 3, 4, 6, ...: at most half is padding."""
    size = smallest
    while size < count:
        size *= 2
    three_quarters = size * 3 // 4
    is_enough = three_quarters >= max(count, smallest)
    return three_quarters if is_enough else size


class FixedStep:
    """One decoding step over its own buffers, for the turns of one level at a time."""

    def __init__(
        self, decoder: Decoder, weights: Weights, num_rows: int, num_positions: int
    ) -> None:
        self.decoder = decoder
        self.weights = weights
        device, dtype = weights.embedding_VX.device, weights.dtype
        heads = (decoder.num_kv_heads, num_positions, decoder.head_dim)
        shape = (decoder.num_layers, num_rows, *heads)
        self.keys_YRKLD = torch.zeros(shape, dtype=dtype, device=device)
        self.values_YRKLD = torch.zeros(shape, dtype=dtype, device=device)
        self.bias_RL = torch.zeros(num_rows, num_positions, dtype=dtype, device=device)
        self.tokens_R = torch.zeros(num_rows, dtype=torch.long, device=device)
        self.positions_R = torch.zeros(num_rows, dtype=torch.long, device=device)
        self.slot_1 = torch.zeros(1, dtype=torch.long, device=device)
        hidden_RX = weights.final_norm.new_zeros(num_rows, weights.embedding_VX.shape[1])
        self.logits_RV = weights.head(hidden_RX)
        # A captured step reads this memory, also after the decoder has made itself longer tables.
        self._rotations = decoder.rotations(num_positions, dtype, device)
        self.replay: Callable[[], None] = self.run

    @property
    def num_positions(self) -> int:
        """Number of positions in the buffers."""
        return self.bias_RL.shape[1]

    def run(self) -> None:
        """Read the tokens, write their keys and values into the slot, and compute the logits."""
        self.bias_RL.index_fill_(1, self.slot_1, 0.0)
        hidden_RX = self.decoder.hidden(
            self.weights,
            self.tokens_R,
            self.positions_R,
            self._attend,
            num_positions=self.num_positions,
        )
        self.logits_RV.copy_(self.weights.head(hidden_RX))

    def _attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys_RKLD, values_RKLD = self.keys_YRKLD[layer], self.values_YRKLD[layer]
        keys_RKLD.index_copy_(2, self.slot_1, keys.unsqueeze(2))
        values_RKLD.index_copy_(2, self.slot_1, values.unsqueeze(2))
        num_rows, num_keys, head_dim = keys.shape
        attended_RKGD = F.scaled_dot_product_attention(
            # The query heads of a group take the place of several positions of one head.
            queries.view(num_rows, num_keys, -1, head_dim),
            keys_RKLD,
            values_RKLD,
            attn_mask=self.bias_RL[:, None, None],
            scale=1.0,
        )
        return attended_RKGD.reshape(num_rows, -1)

    def begin(self, tree: KeyValueTree, lengths_R: Tensor) -> None:
        """Start a level: copy the keys and values visible to each row of the tree's top block."""
        num_rows = len(lengths_R)
        self.tree = tree
        self.num_rows = num_rows
        self.num_steps = 0
        self.bias_RL.fill_(float("-inf"))
        # Padding rows see something, so that no row's softmax is over nothing.
        self.bias_RL[num_rows:, 0] = 0.0
        start = 0
        for block in tree.blocks:
            if block.length:
                self._copy_block(block, start)
                start += block.length
        self.tokens_R.zero_()
        self.positions_R.zero_()
        self.positions_R[:num_rows] = lengths_R
        self.slot_1.fill_(start)
        self.first_slot = start

    def _copy_block(self, block: Block, start: int) -> None:
        """Copy a block's positions to each row that reads them, from position `start` on."""
        stop = start + block.length
        sharing = self.num_rows // block.num_groups
        num_layers, num_heads = len(self.keys_YRKLD), block.keys.shape[2]
        by_group = (num_layers, block.num_groups, sharing, num_heads, block.length, -1)
        keys = self.keys_YRKLD[:, : self.num_rows, :, start:stop].view(by_group)
        # The tree has keys by head dimension first, these by position.
        keys.copy_(block.keys[:, :, None, :, :, : block.length].transpose(-1, -2))
        values = self.values_YRKLD[:, : self.num_rows, :, start:stop].view(by_group)
        values.copy_(block.values[:, :, None, :, : block.length])
        bias = self.bias_RL[: self.num_rows, start:stop].view(block.num_groups, sharing, -1)
        if block.bias_PL is None:
            bias.fill_(0.0)
        else:
            bias.copy_(block.bias_PL[:, None])

    def advance(self, tokens_R: Tensor) -> Tensor:
        """Read one token per row; return the next logits, which the next call overwrites."""
        if self.num_steps:
            self.positions_R[: self.num_rows] += 1
            self.slot_1 += 1
        self.tokens_R[: self.num_rows] = tokens_R
        self.replay()
        self.num_steps += 1
        return self.logits_RV[: self.num_rows]

    def close(self) -> None:
        """Copy the new keys and values into the tree."""
        block = self.tree.top
        stop = block.length + self.num_steps
        block.make_room(stop, max_positions=stop)
        slots = slice(self.first_slot, self.first_slot + self.num_steps)
        new_keys = self.keys_YRKLD[:, : self.num_rows, :, slots]
        new_values = self.values_YRKLD[:, : self.num_rows, :, slots]
        block.keys[..., block.length : stop] = new_keys.transpose(-1, -2)
        block.values[..., block.length : stop, :] = new_values


class FixedSteps:
    """The steps of one model, by size; without `capture` they run uncaptured.

    With `is_required`, a step that cannot be captured is an error.
    """

    def __init__(self, decoder: Decoder, capture: Capture | None, *, is_required: bool) -> None:
        self.decoder = decoder
        self.capture = capture
        self.is_required = is_required
        self._weights: Weights | None = None
        self._steps: dict[tuple[int, int], FixedStep] = {}
        self._has_logged_size = False

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process, which captures its own steps."""
        return {**self.__dict__, "_weights": None, "_steps": {}}

    def copy_uncaptured(self) -> FixedSteps:
        """Return steps of the same kind for other weights, none of them captured yet."""
        return FixedSteps(self.decoder, self.capture, is_required=self.is_required)

    def begin(
        self, weights: Weights, tree: KeyValueTree, lengths: Sequence[int], num_new: int
    ) -> FixedStep | None:
        """Return a step for a level's turns, `num_new` tokens per row; None if it is too large."""
        if weights is not self._weights:
            # Steps read the memory of their weights.
            self._weights = weights
            self._steps = {}
        num_positions = sum(block.length for block in tree.blocks) + num_new
        size = bucket(len(lengths), SMALLEST_ROWS), bucket(num_positions, SMALLEST_LENGTH)
        num_bytes = self._count_bytes(*size)
        device = weights.embedding_VX.device
        if num_bytes > max_bytes(device):
            if not self._has_logged_size:
                logger.info(
                    "%d rows of %d tokens are decoded without fixed shapes: they would take "
                    "%.1f GiB. Smaller rollouts (max_rollout_gib) are captured.",
                    *size,
                    num_bytes / 2**30,
                )
            self._has_logged_size = True
            return None
        step = self._steps.pop(size, None)
        if step is None:
            step = self._build_step(weights, *size)
        # Inserted anew: the most recently used is last.
        self._steps[size] = step
        step.begin(tree, torch.tensor(lengths, device=device))
        return step

    def _count_bytes(self, num_rows: int, num_positions: int) -> int:
        assert self._weights is not None
        per_token = self.decoder.cache_numbers_per_token * self._weights.dtype.itemsize
        return num_rows * num_positions * per_token

    def _build_step(self, weights: Weights, num_rows: int, num_positions: int) -> FixedStep:
        limit = max_bytes(weights.embedding_VX.device)
        num_bytes = self._count_bytes(num_rows, num_positions)
        num_bytes += sum(self._count_bytes(*size) for size in self._steps)
        while self._steps and num_bytes > limit:
            oldest_size = next(iter(self._steps))
            num_bytes -= self._count_bytes(*oldest_size)
            del self._steps[oldest_size]
        # Buffers that are made in inference mode could not be written outside of it.
        with torch.inference_mode(False), torch.no_grad():
            step = FixedStep(self.decoder, weights, num_rows, num_positions)
            self._capture_step(step)
        return step

    def _capture_step(self, step: FixedStep) -> None:
        """Replace the step's run by a captured one, if steps are captured."""
        if self.capture is None:
            return
        num_rows = len(step.tokens_R)
        try:
            step.replay = self.capture(step.run)
        except Exception as error:
            reason = reason_of(error)
            if self.is_required:
                raise ConfigurationError(
                    f"decode_graphs is always, but a step of {num_rows} rows cannot be captured: "
                    f"{reason}. Set decode_graphs to auto."
                ) from error
            logger.warning("decoding steps are not captured: %s", reason)
            self.capture = None
            return
        logger.info(
            "captured the decoding step of %d rows, %d tokens", num_rows, step.num_positions
        )


def build_fixed_steps(
    decoder: Decoder | None, device: torch.device, mode: DecodeGraphs
) -> FixedSteps | None:
    """Build the steps of a model for a `mode`; None on a CPU, where ended rows leave the batch."""
    if mode == "always" and (decoder is None or device.type != "cuda"):
        why = "the model runs on the CPU" if device.type != "cuda" else "it is not Llama-like"
        raise ConfigurationError(
            f"decode_graphs is always, but {why}. Use --device cuda with a Llama-like model, or "
            "set it to auto."
        )
    if decoder is None or device.type == "cpu":
        return None
    capture = capture_cuda_graph if mode != "never" else None
    return FixedSteps(decoder, capture, is_required=mode == "always")
