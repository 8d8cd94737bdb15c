"""The toxicity classifier of the package tox-block, run without TensorFlow."""

from __future__ import annotations

import collections
import importlib.util
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from nip_astra.errors import MissingDependencyError, ModelLoadError, reason_of
from nip_astra.parameters.types import ScorerType
from nip_astra.scorers.base import register_scorer
from nip_astra.scorers.classifier import ModelScorer

Category = Literal["toxicity", "severe_toxicity", "obscene", "threat", "insult", "identity_attack"]
"""Categories of the model's outputs, in order, by Detoxify's names."""
NUM_WORDS = 20_000
MAX_WORDS = 100
_SEPARATORS = str.maketrans(dict.fromkeys('!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~\t\n', " "))
"""Characters that the model's tokenizer replaces with spaces."""
_INSTALL = (
    "the scorer 'toxblock' needs the packages tox-block and h5py. Run: pip install "
    "'nip_astra[toxblock]' && pip install --no-deps tox-block (its TensorFlow is not needed)"
)


@register_scorer(ScorerType.TOXBLOCK)
class ToxBlockScorer(ModelScorer):
    """Probability of one of six kinds of toxicity, by a small recurrent network; English only.

    The score is the sigmoid of the network, without tox-block's rescaling, which can leave [0, 1].
    The last 100 known words of a text are read.
    """

    can_be_copied = True

    class Parameters(ModelScorer.Parameters):
        """Category of toxicity."""

        category: Category = "toxicity"
        """Category whose probability is the score."""

    def __init__(self, parameters: Any, **keywords: Any) -> None:
        super().__init__(parameters, **keywords)
        self._category = get_args(Category).index(parameters.category)
        folder = _find_folder()
        try:
            (weights,) = folder.glob("lstm_model_*.h5")
            (encoder,) = folder.glob("encoder_*.pkl")
            self._word_ids = _read_word_ids(encoder)
            self._model = ToxBlockModel(_read_weights(weights)).to(self.device).eval()
        except (OSError, TypeError, ValueError, LookupError, pickle.UnpicklingError) as error:
            raise ModelLoadError(
                f"unknown files of tox-block in {folder}: {reason_of(error)}. Install the tested "
                "version: pip install --no-deps tox-block==0.1.2"
            ) from error

    def _score(self, texts: Sequence[str]) -> list[float]:
        def rate(rows: list[list[int]]) -> Tensor:
            return self._probabilities(rows)[:, self._category]

        return self._in_batches([self._ids(text) for text in texts], rate, len)

    def _probabilities(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Return each category's probability for each text, float32 `[text, category]`."""
        # The network was trained on rows of this length, zeros first, and reads the zeros too.
        padded = [[0] * (MAX_WORDS - len(row)) + list(row) for row in rows]
        result: Tensor = self._model(torch.tensor(padded, device=self.device))
        return result

    def _ids(self, text: str) -> list[int]:
        words = text.lower().translate(_SEPARATORS).split(" ")
        ids = [self._word_ids[word] for word in words if word in self._word_ids]
        return ids[-MAX_WORDS:]


class ToxBlockModel(nn.Module):
    """Embedding, two recurrent directions, maximum over words, two dense layers, six sigmoids.

    `torch.nn.LSTM` cannot stand in: the gates were trained with Keras' piecewise linear sigmoid,
    `clip(0.2 x + 0.5, 0, 1)`.

    Parameters
    ----------
    weights : dict[str, Tensor]
        By the names of the Keras file; `forward_*` and `backward_*` have the gates in the order
        input, forget, cell, output.
    """

    embeddings: Tensor
    kernel: Tensor
    recurrent_kernel: Tensor
    bias: Tensor

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        both = [
            torch.stack([weights[f"{side}_{part}"] for side in ("forward", "backward")])
            for part in ("kernel", "recurrent_kernel", "bias")
        ]
        self.register_buffer("embeddings", weights["embeddings"])
        self.register_buffer("kernel", both[0])
        self.register_buffer("recurrent_kernel", both[1])
        self.register_buffer("bias", both[2][:, None, :])
        self.hidden = _linear(weights["dense_kernel"], weights["dense_bias"])
        self.output = _linear(weights["dense_1_kernel"], weights["dense_1_bias"])

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Return the probability of each category, `[B, 6]`."""
        # Both directions are one batch of two, `[2, B, T, X]`: the second reads from the end.
        inputs = self.embeddings[torch.stack([ids_BT, ids_BT.flip(1)])]
        gates = torch.einsum("sbtx,sxg->sbtg", inputs, self.kernel) + self.bias[:, None]
        cell = inputs.new_zeros(*inputs.shape[:2], self.recurrent_kernel.shape[1])
        state, highest = cell, torch.full_like(cell, -torch.inf)
        for time in range(ids_BT.shape[1]):
            total = gates[:, :, time] + state @ self.recurrent_kernel
            take, keep, new, show = total.chunk(4, dim=-1)
            cell = _hard_sigmoid(keep) * cell + _hard_sigmoid(take) * new.tanh()
            state = _hard_sigmoid(show) * cell.tanh()
            highest = torch.maximum(highest, state)
        hidden = self.hidden(torch.cat([highest[0], highest[1]], dim=-1)).relu()
        result: Tensor = self.output(hidden).sigmoid()
        return result


def _hard_sigmoid(values: Tensor) -> Tensor:
    return (0.2 * values + 0.5).clamp(0, 1)


def _linear(kernel: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(*kernel.shape)
    layer.weight = nn.Parameter(kernel.T.contiguous(), requires_grad=False)
    layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


def _find_folder() -> Path:
    """Find the weights' folder without importing the package, which loads TensorFlow."""
    spec = importlib.util.find_spec("tox_block")
    folders = (spec and spec.submodule_search_locations) or ()
    if not folders or importlib.util.find_spec("h5py") is None:
        raise MissingDependencyError(_INSTALL)
    return Path(folders[0]) / "trained_models"


def _read_weights(path: Path) -> dict[str, Tensor]:
    import h5py

    names = {
        "embeddings": "embedding/embedding/embeddings:0",
        **{
            f"{side}_{part}": f"bidirectional/bidirectional/{side}_lstm/{part}:0"
            for side in ("forward", "backward")
            for part in ("kernel", "recurrent_kernel", "bias")
        },
        **{
            f"{layer}_{part}": f"{layer}/{layer}/{part}:0"
            for layer in ("dense", "dense_1")
            for part in ("kernel", "bias")
        },
    }
    with h5py.File(path) as file:
        return {
            name: torch.from_numpy(
                np.asarray(file["model_weights"][path_in_file], dtype=np.float32)
            )
            for name, path_in_file in names.items()
        }


class _Plain:
    """Placeholder for the package's classes; only attributes are read."""


class _WordsUnpickler(pickle.Unpickler):
    """Reads containers, numbers and attributes; executes no code from the file."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "int"):
            return int
        if module == "collections" and name in ("OrderedDict", "defaultdict"):
            return getattr(collections, name)
        return _Plain


def _read_word_ids(path: Path) -> dict[str, int]:
    """Read the index of each word in the model's vocabulary."""
    with path.open("rb") as file:
        encoder = _WordsUnpickler(file).load()
    word_index = vars(vars(encoder)["tokenizer"])["word_index"]
    return {str(word): int(number) for word, number in word_index.items() if number < NUM_WORDS}
