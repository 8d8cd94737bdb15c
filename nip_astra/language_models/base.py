"""What a language-model backend must give: samples with log-probabilities, and scores of tokens.

Shape suffixes: `B` row, `C` context position, `T` continuation position, `V` vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nip_astra.errors import ModelLoadError
from nip_astra.language_models.drawn import KeptTokens
from nip_astra.parameters.parameters_base import PolymorphicParameters


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are drawn from the model's distribution."""

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    end_ids: tuple[int, ...] = ()
    """Tokens that end a turn besides the model's own."""

    @property
    def cuts(self) -> bool:
        """Whether `top_k` or `top_p` keeps unlikely tokens from being drawn."""
        return self.top_k is not None or self.top_p < 1.0


@dataclass(frozen=True)
class Drawn:
    """Says that tokens are to be scored under the distribution that they were drawn from.

    That is the model's at `temperature`, over the tokens that may be drawn: no special ones, no end
    before `min_new_tokens`, and of the others those that `top_k` and `top_p` left.

    Attributes
    ----------
    options : SamplingOptions
        With which they were drawn; temperature 0 draws from no distribution.
    kept : KeptTokens or None
        Of each token in turn; needed where the options cut. `LanguageModel.kept_tokens` finds them.
    """

    options: SamplingOptions
    kept: KeptTokens | None = None


Draw = Callable[[Tensor, Tensor, int, SamplingOptions], tuple[Tensor, Tensor]]
"""`(logits_BV, uniforms_B, position, options) -> (tokens_B, logprobs_B)`; may use up the logits."""


@dataclass(frozen=True)
class Generation:
    """Sampled continuations, right-padded.

    Attributes
    ----------
    ids_BT : Tensor
        int64; the end token, where the model said it, is the last one of a row; padding is 0.
    mask_BT : Tensor
        bool; True on sampled tokens, the end token included.
    logprobs_BT : Tensor
        float32, nats, no gradient: log p of each sampled token under the unmodified distribution
        (temperature 1, nothing cut off); 0 on padding.
    """

    ids_BT: Tensor
    mask_BT: Tensor
    logprobs_BT: Tensor


class Turns(NamedTuple):
    """What a session said, and how likely it found parts of what it read.

    Attributes
    ----------
    generation : Generation
        Rows ordered by context.
    span_logprobs_CT : Tensor or None
        float32 `[C, T]`, nats, 0 on padding: log p of the tokens of each context's span; None
        where none was asked for.
    """

    generation: Generation
    span_logprobs_CT: Tensor | None


class TokenScores(NamedTuple):
    """What a model thinks of each token of continuations.

    Attributes
    ----------
    logprobs_BT : Tensor
        float32, nats, 0 on padding.
    entropy_BT : Tensor or None
        Entropy of the distribution that the token was one of; float32, nats, 0 on padding.
    hidden_BTX : Tensor or None
        Last hidden state of the position that predicts the token, which is what was read before
        it; float32, 0 on padding.
    """

    logprobs_BT: Tensor
    entropy_BT: Tensor | None = None
    hidden_BTX: Tensor | None = None


@dataclass
class TokenCount:
    """What a backend has computed so far; the measure of waste.

    Attributes
    ----------
    forwarded : int
        Positions that went through the model, padding included.
    generated : int
        Tokens sampled.
    scored : int
        Distinct tokens, each in its place, that scoring had to read; the fewest that could have
        been forwarded for it.
    head_rows : int
        Positions for which the distribution over the vocabulary was computed.
    rescored : int
        Positions that went through the model only to score again what it had sampled; they are in
        none of the others.
    """

    forwarded: int = 0
    generated: int = 0
    scored: int = 0
    head_rows: int = 0
    rescored: int = 0

    def add(self, other: TokenCount) -> None:
        """Count what another count counted too."""
        for counted in fields(TokenCount):
            name = counted.name
            setattr(self, name, getattr(self, name) + getattr(other, name))


class GenerationSession(ABC):
    """One rollout through a model: calls in turn, each continuing what the last one said.

    The weights of the model stay as they are while a session is open.
    """

    @abstractmethod
    def generate(
        self,
        contexts: Sequence[Sequence[int]],
        rows_per_context: int,
        uniforms_RT: Tensor,
        options: SamplingOptions,
        *,
        branching: int = 1,
        spans: Sequence[tuple[int, int]] | None = None,
    ) -> Turns:
        """Sample turns as `LanguageModel.generate` does, and score spans of what is read.

        Parameters
        ----------
        branching : int
            Contexts that continue one row: context i continues row `i // branching` of the last
            call, and in a first call so many neighbours are expected to begin alike. A context
            that does not continue its row is read from its beginning.
        spans : Sequence[tuple[int, int]], optional
            For each context, where the tokens to be scored begin, at least 1, and end.
        """

    def close(self) -> None:  # noqa: B027 - who keeps nothing has nothing to free
        """Free what was kept for further calls."""


class _SeparateCalls(GenerationSession):
    """A session of a model that keeps nothing between calls."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model

    def generate(
        self,
        contexts: Sequence[Sequence[int]],
        rows_per_context: int,
        uniforms_RT: Tensor,
        options: SamplingOptions,
        *,
        branching: int = 1,
        spans: Sequence[tuple[int, int]] | None = None,
    ) -> Turns:
        generation = self.model.generate(contexts, rows_per_context, uniforms_RT, options)
        if spans is None:
            return Turns(generation, None)
        cpu = torch.device("cpu")
        before = [context[:start] for context, (start, _) in zip(contexts, spans, strict=True)]
        tokens = [context[a:b] for context, (a, b) in zip(contexts, spans, strict=True)]
        with torch.no_grad():
            scored = self.model.logprobs(*pad_left(before, cpu), *pad_right(tokens, cpu))
        return Turns(generation, scored.cpu())


class LanguageModel(ABC):
    """A causal language model with its tokenizer.

    A backend gives `generate` and `logprobs`; one that can keep its caches between the levels of a
    tree gives `open_session` too.

    Attributes
    ----------
    tokenizer
        A Hugging Face tokenizer.
    context_window : int
        Most tokens that context and continuation may have together.
    end_ids : tuple[int, ...]
        Tokens that end a turn.
    token_count : TokenCount
        Running count of work done.
    cache_bytes_per_token : int
        Memory that a session keeps for each token; 0 where it keeps none.
    can_be_forked : bool
        Whether a forked process may generate and score: there is no connection, device or thread
        behind the model, and `token_count` is all that generating changes.
    can_be_copied : bool
        Whether a copy in another process, sent there by pickle, may generate and score.
    can_score_contexts : bool
        Whether sessions give log-probabilities of spans of what is read.
    """

    class Parameters(PolymorphicParameters):
        """Parameters of the backend; a subclass adds its own."""

        type_name: ClassVar[str] = ""

    tokenizer: Any
    context_window: int
    end_ids: tuple[int, ...]
    token_count: TokenCount
    cache_bytes_per_token: int = 0
    can_be_forked: bool = False
    can_be_copied: bool = False
    can_score_contexts: bool = True

    @classmethod
    @abstractmethod
    def load(
        cls, parameters: Any, *, device: torch.device, scenario_dir: Path | None, trainable: bool
    ) -> LanguageModel:
        """Load the model. Raises `ModelLoadError` where it cannot be found or read."""

    @abstractmethod
    def generate(
        self,
        contexts: Sequence[Sequence[int]],
        rows_per_context: int,
        uniforms_BT: Tensor,
        options: SamplingOptions,
    ) -> Generation:
        """Sample `rows_per_context` continuations of each context, row-major by context.

        Parameters
        ----------
        uniforms_BT : Tensor
            One uniform number in [0, 1) a row and token; the only randomness used.
        """

    def open_session(self) -> GenerationSession:
        """Start a rollout."""
        return _SeparateCalls(self)

    @abstractmethod
    def logprobs(
        self, context_BC: Tensor, context_mask_BC: Tensor, ids_BT: Tensor, mask_BT: Tensor
    ) -> Tensor:
        """Log-probabilities of each continuation token, `[B, T]` float32 nats, 0 on padding.

        The context is left-padded, the continuation right-padded. Gradients flow into the
        parameters of a trainable model where grad mode is on.
        """

    def token_scores(
        self,
        context_BC: Tensor,
        context_mask_BC: Tensor,
        ids_BT: Tensor,
        mask_BT: Tensor,
        *,
        needs_entropy: bool = False,
        needs_hidden: bool = False,
        drawn: Drawn | None = None,
    ) -> TokenScores:
        """`logprobs` and, from the same pass, entropies and hidden states.

        Parameters
        ----------
        drawn : Drawn, optional
            Score under the distribution that tokens are drawn from; without it, under the model's
            own (temperature 1, nothing cut off).

        Raises
        ------
        ModelLoadError
            When this backend cannot do what is asked for.
        """
        if drawn is not None:
            raise ModelLoadError(
                "log-probabilities under a tempered or cut distribution were asked for, but the "
                f"backend {type(self).__name__} gives those of the model's own alone. Set the "
                "trainer's behaviour.logprobs to raw, or use the huggingface backend."
            )
        if needs_entropy or needs_hidden:
            raise ModelLoadError(
                f"entropies or hidden states were asked for, but the backend {type(self).__name__} "
                "gives log-probabilities only. Switch off what needs them (entropy bonus, value "
                "head), or use the huggingface backend."
            )
        return TokenScores(self.logprobs(context_BC, context_mask_BC, ids_BT, mask_BT))

    def kept_tokens(
        self,
        context_BC: Tensor,
        context_mask_BC: Tensor,
        ids_BT: Tensor,
        mask_BT: Tensor,
        options: SamplingOptions,
    ) -> KeptTokens:
        """The tokens that `top_k` and `top_p` leave at each position, row by row, on the CPU.

        Raises
        ------
        ModelLoadError
            When this backend cannot tell.
        """
        raise ModelLoadError(
            f"the tokens that top_k or top_p leave were asked for, but the backend "
            f"{type(self).__name__} cannot tell them. Set the trainer's behaviour.logprobs to raw, "
            "or use the huggingface backend."
        )

    def sampled_logprobs(
        self,
        context_BC: Tensor,
        context_mask_BC: Tensor,
        ids_BT: Tensor,
        mask_BT: Tensor,
        options: SamplingOptions,
    ) -> Tensor | None:
        """The log-probability with which `generate` draws each token, at temperature 1.

        It never draws special tokens, nor an end before `min_new_tokens`; the others share what
        those would have had. Temperature, top_k and top_p are not looked at.

        Returns
        -------
        Tensor or None
            `[B, T]` float32, nats, no gradient, 0 on padding; None where this backend cannot tell.
        """
        return None

    @abstractmethod
    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """The parameters that training may change; none for a frozen model."""

    @abstractmethod
    def num_parameters(self) -> int:
        """The number of weights, trainable or not."""

    def shared_parts(self) -> list[object]:
        """What this model may share with others, so that copies of both share it too."""
        return [self.tokenizer]

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states that `token_scores` gives; 0 where it gives none."""
        return 0

    @abstractmethod
    def frozen_reference(self) -> LanguageModel:
        """A model that stays as this one is now; shares weights where it can."""

    def base_for(self, parameters: Any) -> LanguageModel | None:
        """A frozen model on this one's weights where that is what `parameters` describe.

        None where it is another model, or where training changes the weights that would be shared.
        """
        return None

    @property
    def samples_as_it_scores(self) -> bool:
        """Whether `generate` gives the log-probabilities that `logprobs` would, up to rounding of
        float32. Where it does not, what is compared with a loss's is scored again.
        """
        return True

    def take_metrics(self) -> dict[str, float]:
        """What the backend has to log about its sampling since it was last asked."""
        return {}

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write what training changes, exactly, in Hugging Face layout."""

    @abstractmethod
    def restore(self, directory: Path) -> None:
        """Read back what `save` wrote. Raises `CheckpointError` where it does not fit."""

    @abstractmethod
    def save_pretrained(self, directory: Path) -> None:
        """Write a complete model and tokenizer for `AutoModelForCausalLM.from_pretrained`."""

    @contextmanager
    def counting(self) -> Iterator[TokenCount]:
        """A count of the work done within the block, filled in when it ends."""
        before = replace(self.token_count)
        spent = TokenCount()
        try:
            yield spent
        finally:
            for counted in fields(TokenCount):
                name = counted.name
                setattr(spent, name, getattr(self.token_count, name) - getattr(before, name))

    @contextmanager
    def rescoring(self) -> Iterator[None]:
        """Count what is forwarded within the block as `rescored`, and nothing else of it."""
        before = replace(self.token_count)
        try:
            yield
        finally:
            rescored = before.rescored + self.token_count.forwarded - before.forwarded
            # In place: a model and its scorer share one count.
            vars(self.token_count).update({**vars(before), "rescored": rescored})


def pad_left(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids `[B, C]` int64 and mask `[B, C]` bool, padded on the left with 0."""
    return _pad(rows, device, "left")


def pad_right(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids `[B, T]` int64 and mask `[B, T]` bool, padded on the right with 0."""
    return _pad(rows, device, "right")


def _pad(
    rows: Sequence[Sequence[int]], device: torch.device, side: Literal["left", "right"]
) -> tuple[Tensor, Tensor]:
    if not rows:
        return torch.zeros(0, 0, dtype=torch.long), torch.zeros(0, 0, dtype=torch.bool)
    ids = [torch.tensor(row, dtype=torch.long) for row in rows]
    ones = [torch.ones(len(row), dtype=torch.bool) for row in rows]
    padded = pad_sequence(ids, batch_first=True, padding_side=side)
    mask = pad_sequence(ones, batch_first=True, padding_side=side)
    return padded.to(device), mask.to(device)
