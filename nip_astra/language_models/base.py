"""Language models over tokens: three abilities (sampling, scoring, learning), and their outputs.

Shape suffixes: `B` row, `R` row of a session, `C` context position, `T` continuation position,
`V` vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nip_astra.errors import ModelAbilityError, ModelLoadError, NonFiniteOutputError
from nip_astra.language_models.sampling import SamplingDistribution as SamplingDistribution
from nip_astra.language_models.sampling import SamplingOptions as SamplingOptions
from nip_astra.language_models.sampling import SupportMask
from nip_astra.language_models.sequences import (
    GenerationRequest,
    Progress,
    RunningSequence,
    TokenRecord,
)
from nip_astra.language_models.structured import Grammars
from nip_astra.parameters.parameters_base import ComponentRegistry, PolymorphicParameters
from nip_astra.utils.seeding import uniform_rows


@dataclass(frozen=True)
class Generation:
    """Sampled continuations, right-padded."""

    ids_BT: Tensor
    """int64; the last token of a row is its end token, if it ended; padding is 0."""
    mask_BT: Tensor
    """bool; True on sampled tokens, including the end token."""
    logprobs_BT: Tensor
    """float32, nats, no gradient: log p of each sampled token under the unmodified distribution
    (temperature 1, no truncation); 0 on padding."""


TokenRows: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
"""`context_BC`, `context_mask_BC`, `ids_BT` and `mask_BT`, as in `TokenScorer.logprobs`."""


class Turns(NamedTuple):
    """Turns sampled by a session, and log-probabilities of spans of their contexts."""

    generation: Generation
    """Rows ordered by context."""
    span_logprobs_CT: Tensor | None
    """float32 `[C, T]`, nats, 0 on padding: log p of the tokens of each context's span; None unless
    requested."""


class TokenScores(NamedTuple):
    """Log-probabilities of continuation tokens, with entropies and hidden states if requested."""

    logprobs_BT: Tensor
    """float32, nats, 0 on padding."""
    entropy_BT: Tensor | None = None
    """Entropy of the distribution at the token; float32, nats, 0 on padding."""
    hidden_BTX: Tensor | None = None
    """Last hidden state of the position that predicts the token; float32, 0 on padding."""


@dataclass
class TokenCount:
    """Work of a backend so far."""

    forwarded: int = 0
    """Positions forwarded through the model, including padding."""
    generated: int = 0
    """Tokens sampled."""
    scored: int = 0
    """Distinct tokens in context that scoring had to read: the minimum to forward for it."""
    head_rows: int = 0
    """Positions for which the distribution over the vocabulary was computed."""
    rescored: int = 0
    """Positions forwarded only to score sampled tokens again; not part of the other counts."""

    def add(self, other_count: TokenCount) -> None:
        """Add another count."""
        for counter in fields(self):
            total = getattr(self, counter.name) + getattr(other_count, counter.name)
            setattr(self, counter.name, total)


class Counted:
    """Base class of objects whose work is counted."""

    token_count: TokenCount

    @contextmanager
    def counting(self) -> Iterator[TokenCount]:
        """Yield the work done within the block, filled in when it ends."""
        before = replace(self.token_count)
        spent = TokenCount()
        try:
            yield spent
        finally:
            for counter in fields(spent):
                increase = getattr(self.token_count, counter.name) - getattr(before, counter.name)
                setattr(spent, counter.name, increase)

    @contextmanager
    def rescoring(self) -> Iterator[None]:
        """Count positions forwarded within the block as `rescored` only."""
        before = replace(self.token_count)
        try:
            yield
        finally:
            num_forwarded = self.token_count.forwarded - before.forwarded
            # In place: a model and its scorer share one count.
            for counter in fields(before):
                setattr(self.token_count, counter.name, getattr(before, counter.name))
            self.token_count.rescored += num_forwarded


def pad_left(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ids `[B, C]` int64 and mask `[B, C]` bool, padded on the left with 0."""
    return _pad(rows, device, "left")


def pad_right(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ids `[B, T]` int64 and mask `[B, T]` bool, padded on the right with 0."""
    return _pad(rows, device, "right")


def _pad(
    rows: Sequence[Sequence[int]], device: torch.device, side: Literal["left", "right"]
) -> tuple[Tensor, Tensor]:
    if not rows:
        return torch.zeros(0, 0, dtype=torch.long), torch.zeros(0, 0, dtype=torch.bool)
    ids = [torch.tensor(row, dtype=torch.long) for row in rows]
    masks = [torch.ones(len(row), dtype=torch.bool) for row in rows]
    padded = pad_sequence(ids, batch_first=True, padding_side=side)
    mask = pad_sequence(masks, batch_first=True, padding_side=side)
    return padded.to(device), mask.to(device)


def require_finite(
    logprobs_BT: Tensor, mask_BT: Tensor, *, role: str, model: object, during: object
) -> None:
    """Raise for NaN log-probabilities of a turn; padding is not checked.

    One logit that is NaN or +inf makes all log-probabilities of its position NaN.
    """
    is_nan_BT = logprobs_BT.isnan() & mask_BT.to(logprobs_BT.device)
    if not bool(is_nan_BT.any()):
        return
    first_row, first_position = is_nan_BT.nonzero()[0].tolist()
    num_rows = int(is_nan_BT.any(dim=1).sum())
    name = getattr(model, "source", None) or type(model).__name__
    raise NonFiniteOutputError(
        f"the {role}'s model {name} returned NaN logits in {during}: token {first_position + 1} of "
        f"row {first_row + 1} ({num_rows} of {len(logprobs_BT)} rows). Compute in float32 "
        "(language_model.dtype), or resume from an earlier checkpoint with a lower learning rate."
    )


class GenerationSession(ABC):
    """One rollout of a model, in which each call continues the turns of the last one.

    The weights must not change while a session is open.
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
        """Sample turns as `TokenSampler.generate` does, and score spans of their contexts.

        Parameters
        ----------
        branching : int
            Contexts per row of the last call: context i continues row `i // branching`; in a first
            call, as many neighbours are expected to begin alike. A context that does not continue
            its row is forwarded from its beginning.
        spans : Sequence[tuple[int, int]], optional
            For each context, start (at least 1) and end of the tokens to score.
        """

    def settle(self, generations: Sequence[Generation]) -> list[Generation]:
        """Return the turns of all calls, in order, with log-probabilities as in the losses.

        Those of `generate` may be the sampler's own until then.
        """
        return list(generations)

    def keep(self, are_kept: Sequence[bool]) -> None:  # noqa: B027 - nothing is cached
        """Drop rows of the last call; the next call continues the others only."""

    def close(self) -> None:  # noqa: B027 - a session without caches frees nothing
        """Free the caches."""


class TokenModel(Counted, ABC):
    """A model with a tokenizer; subclasses add its abilities."""

    class Parameters(PolymorphicParameters):
        """Parameters of the backend; a subclass adds its own."""

        type_name: ClassVar[str] = ""

    tokenizer: Any
    """A Hugging Face tokenizer."""
    context_window: int
    """Maximum tokens of context and continuation together."""
    end_ids: tuple[int, ...]
    """Tokens that end a turn."""
    cache_bytes_per_token: int = 0
    """Memory of a session per token; 0 if none."""
    can_be_forked: bool = False
    """Whether a forked process may sample and score: the model has no connection, device or thread,
    and changes only `token_count`."""
    can_be_copied: bool = False
    """Whether a pickled copy in another process may sample and score."""
    is_in_this_process: bool = False
    """Whether this process holds the weights; if so, each process of a run has a copy."""
    can_score_contexts: bool = True
    """Whether sessions return log-probabilities of spans of contexts."""
    submodels: Sequence[TokenModel] = ()
    """Models that generate in its place, each some of the turns."""

    @classmethod
    @abstractmethod
    def load(
        cls, parameters: Any, *, device: torch.device, scenario_dir: Path | None, trainable: bool
    ) -> TokenModel:
        """Load the model. Raises `ModelLoadError` if it is missing or unreadable."""

    @abstractmethod
    def num_parameters(self) -> int:
        """Number of weights, trainable or not."""

    def shared_parts(self) -> list[object]:
        """Return objects that this model may share with others; copies of both share them too."""
        return [self.tokenizer, self.token_count]

    def to_send(self) -> TokenModel:
        """Return the model to pickle when this one is copied to another process."""
        return self

    def base_for(self, parameters: Any) -> TokenModel | None:
        """Return a frozen model on this one's weights if `parameters` describe that; else None.

        Also None if training changes the weights that would be shared.
        """
        return None

    def take_metrics(self) -> dict[str, float]:
        """Return metrics of the backend's sampling since the last call."""
        return {}


class TokenSampler(TokenModel):
    """A model that samples tokens; override `open_session` to cache the levels of a tree."""

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
            One uniform number in [0, 1) per row and token; the only source of randomness.
        """

    def complete(
        self, requests: Sequence[GenerationRequest], *, max_rows: int
    ) -> list[list[Progress]]:
        """Answer requests, each by its own options and seeds; return each answer's last progress.

        At most `max_rows` answers are generated at once. Raises `ModelAbilityError` if a request
        has a grammar and the model has no `grammars`.
        """
        if any(request.grammar is not None for request in requests):
            # Raises before anything is generated.
            _ = self.grammars
        cpu = torch.device("cpu")
        end_ids = frozenset(self.end_ids)
        sequences_by_request: list[list[RunningSequence]] = []
        for request in requests:
            sequences = [
                RunningSequence(request, index, self.tokenizer, end_ids, device=cpu)
                for index in range(request.num_samples)
            ]
            sequences_by_request.append(sequences)
        # One call of `generate` has one set of options.
        rows_by_options: dict[SamplingOptions, list[RunningSequence]] = {}
        for sequence in chain.from_iterable(sequences_by_request):
            rows_by_options.setdefault(sequence.request.options, []).append(sequence)
        for options, rows in rows_by_options.items():
            # Neighbours with a common prefix share its cache.
            rows.sort(key=lambda row: row.request.prompt)
            for start in range(0, len(rows), max_rows):
                self._complete_rows(rows[start : start + max_rows], options)
        results = []
        for sequences in sequences_by_request:
            progress = [sequence.take_progress() for sequence in sequences]
            results.append([item for item in progress if item is not None])
        return results

    @property
    def grammars(self) -> Grammars:
        """Return the grammars that `complete` can enforce.

        Raises `ModelAbilityError` if there are none, and as `Grammars`.
        """
        raise ModelAbilityError(
            f"a {type(self).__name__} cannot keep its answers to a grammar. Use a model of the "
            "Llama family in this process, or a service that supports response_format."
        )

    def _complete_rows(self, rows: Sequence[RunningSequence], options: SamplingOptions) -> None:
        # A row's uniform numbers follow from its own key, so answers do not depend on the batch.
        keys = [row.request.seed_key(row.index) for row in rows]
        uniforms_BT = uniform_rows(keys, options.max_new_tokens)
        prompts = [row.request.prompt for row in rows]
        turns = self.generate(prompts, 1, uniforms_BT, options)
        require_finite(turns.logprobs_BT, turns.mask_BT, role="chat", model=self, during="a batch")
        ids = turns.ids_BT.tolist()
        logprobs = turns.logprobs_BT.tolist()
        for row, row_ids, row_logprobs in zip(rows, ids, logprobs, strict=True):
            for token_id, logprob in zip(row_ids, row_logprobs, strict=True):
                # A stop text may end an answer before the turn ends.
                if row.finish_reason is None:
                    row.append(TokenRecord(token_id, logprob))

    def open_session(self) -> GenerationSession:
        """Start a rollout."""
        return _UncachedSession(self)

    @property
    def samples_as_it_scores(self) -> bool:
        """Whether `generate` returns the log-probabilities of `logprobs`, up to float32 rounding.

        If not, sampled tokens are scored again before they are compared with a loss's scores.
        """
        return True


class _UncachedSession(GenerationSession):
    """A session of a model without caches."""

    def __init__(self, model: TokenSampler) -> None:
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
        tokens_before: list[Sequence[int]] = []
        tokens_of_span: list[Sequence[int]] = []
        for context, (start, stop) in zip(contexts, spans, strict=True):
            tokens_before.append(context[:start])
            tokens_of_span.append(context[start:stop])
        context_BC, context_mask_BC = pad_left(tokens_before, cpu)
        ids_BT, mask_BT = pad_right(tokens_of_span, cpu)
        with torch.no_grad():
            scorer = as_scorer(self.model, role="model", to="score its contexts")
            logprobs_BT = scorer.logprobs(context_BC, context_mask_BC, ids_BT, mask_BT)
        return Turns(generation, logprobs_BT.cpu())


class TokenScorer(TokenModel):
    """A model that returns log-probabilities of tokens, as a reference or a teacher."""

    @abstractmethod
    def logprobs(
        self, context_BC: Tensor, context_mask_BC: Tensor, ids_BT: Tensor, mask_BT: Tensor
    ) -> Tensor:
        """Return log-probabilities of the continuation tokens, `[B, T]` float32 nats, 0 on padding.

        The context is left-padded, the continuation right-padded. Gradients flow into the
        parameters of a trainable model if grad mode is on.
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
        distribution: SamplingDistribution | None = None,
    ) -> TokenScores:
        """Return `logprobs` with entropies and hidden states from the same pass.

        They are under `distribution`, from which tokens were drawn, or by default under the model's
        own (temperature 1, no truncation).

        Raises `ModelLoadError` if the backend does not support an option.
        """
        if distribution is not None:
            raise ModelLoadError(
                f"the backend {type(self).__name__} cannot score under a tempered or cut "
                "distribution. Set the trainer's behaviour.logprobs to raw, or use huggingface."
            )
        if needs_entropy or needs_hidden:
            raise ModelLoadError(
                f"the backend {type(self).__name__} gives no entropies or hidden states. Turn off "
                "the entropy bonus or value head, or use huggingface."
            )
        return TokenScores(self.logprobs(context_BC, context_mask_BC, ids_BT, mask_BT))

    def tempered_logprobs(
        self,
        context_BC: Tensor,
        context_mask_BC: Tensor,
        ids_BT: Tensor,
        mask_BT: Tensor,
        temperature: float,
    ) -> Tensor:
        """Return `logprobs` of the whole vocabulary at a temperature above 0.

        Raises `ModelLoadError` for another than 1 if the backend does not support it.
        """
        rows = (context_BC, context_mask_BC, ids_BT, mask_BT)
        if temperature == 1.0:
            return self.logprobs(*rows)
        tempered = SamplingDistribution.tempered(temperature)
        return self.token_scores(*rows, distribution=tempered).logprobs_BT

    def support_mask(
        self,
        context_BC: Tensor,
        context_mask_BC: Tensor,
        ids_BT: Tensor,
        mask_BT: Tensor,
        options: SamplingOptions,
    ) -> SupportMask:
        """Return the tokens that `top_k` and `top_p` keep at each position, row by row, on the CPU.

        Raises `ModelLoadError` if the backend does not support it.
        """
        raise ModelLoadError(
            f"the backend {type(self).__name__} cannot find the tokens that top_k or top_p keep. "
            "Set the trainer's behaviour.logprobs to raw, or use huggingface."
        )

    def sampled_logprobs(
        self,
        context_BC: Tensor,
        context_mask_BC: Tensor,
        ids_BT: Tensor,
        mask_BT: Tensor,
        options: SamplingOptions,
    ) -> Tensor | None:
        """Return the log-probability with which `generate` draws each token at temperature 1.

        Special tokens, and ends before `min_new_tokens`, have no mass there. Temperature, top_k
        and top_p are ignored. `[B, T]` float32, nats, no gradient, 0 on padding; None if unknown.
        """
        return None

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states of `token_scores`; 0 without any."""
        return 0


class Learner(TokenModel):
    """A model that can be trained."""

    @abstractmethod
    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yield the trainable parameters; none for a frozen model."""

    @abstractmethod
    def frozen_reference(self) -> TokenModel:
        """Return a frozen snapshot of this model; weights are shared if possible."""

    def sampler_copy(self) -> LanguageModel:
        """Return an independent copy that samples as this model does now.

        Raises `ModelLoadError` if the backend cannot be held twice.
        """
        raise ModelLoadError(
            f"the backend {type(self).__name__} cannot sample from a copy while it learns. Set "
            "max_staleness to 0, or use huggingface."
        )

    def weight_copy(self) -> dict[str, Tensor]:
        """Return a copy of the weights, for `take_weights` of a `sampler_copy`."""
        return {}

    def take_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load weights from `weight_copy`."""

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write the trainable weights, exactly, in Hugging Face layout."""

    @abstractmethod
    def restore(self, directory: Path) -> None:
        """Restore the weights written by `save`. Raises `CheckpointError` if they do not fit."""

    @abstractmethod
    def save_pretrained(self, directory: Path) -> None:
        """Write a complete model and tokenizer for `AutoModelForCausalLM.from_pretrained`."""


class LanguageModel(TokenSampler, TokenScorer, Learner):
    """A causal language model with its tokenizer that samples, scores and learns."""


def as_sampler(model: TokenModel, *, role: str) -> TokenSampler:
    """Return the model as a `TokenSampler`. Raises `ModelAbilityError` if it cannot sample."""
    if not isinstance(model, TokenSampler):
        raise _ability_error(model, "TokenSampler", role=role, purpose="sample")
    return model


def as_scorer(model: TokenModel, *, role: str, to: str) -> TokenScorer:
    """Return the model as a `TokenScorer`. Raises `ModelAbilityError` if it cannot score."""
    if not isinstance(model, TokenScorer):
        raise _ability_error(model, "TokenScorer", role=role, purpose=to)
    return model


def as_learner(model: TokenModel, *, role: str, to: str) -> Learner:
    """Return the model as a `Learner`. Raises `ModelAbilityError` if it cannot learn."""
    if not isinstance(model, Learner):
        raise _ability_error(model, "Learner", role=role, purpose=to)
    return model


def as_language_model(model: TokenModel, *, role: str) -> LanguageModel:
    """Return the model with all abilities. Raises `ModelAbilityError` if it lacks one."""
    as_learner(model, role=role, to="learn")
    as_sampler(model, role=role)
    as_scorer(model, role=role, to="learn from log-probabilities of its samples")
    return cast("LanguageModel", model)


def _ability_error(
    model: TokenModel, ability: str, *, role: str, purpose: str
) -> ModelAbilityError:
    abilities: tuple[type[TokenModel], ...] = (TokenSampler, TokenScorer, Learner)
    present = [cls.__name__ for cls in abilities if isinstance(model, cls)]
    parameters = getattr(type(model), "Parameters", None)
    name = getattr(parameters, "type_name", "") or type(model).__name__
    return ModelAbilityError(
        f"the {role} needs a {ability} to {purpose}, but the backend {name!r} is "
        f"{' and '.join(present) or 'no such ability'} only. Use huggingface."
    )


LANGUAGE_MODELS: ComponentRegistry[type[TokenModel]] = ComponentRegistry("language_model")


def register_language_model(name: str) -> Callable[[type[TokenModel]], type[TokenModel]]:
    """Register a `TokenModel` subclass under its `_type` in parameter files; a decorator."""
    return LANGUAGE_MODELS.register(name)
