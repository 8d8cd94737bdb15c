"""What a language model can do, ability by ability: sample tokens, score tokens, learn.

A role asks for the abilities that it needs, by `as_sampler`, `as_scorer`, `as_learner` or
`as_language_model`; a model that lacks one is refused by name.

Shape suffixes: `B` row, `R` row of a session, `C` context position, `T` continuation position.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from nip_astra.errors import ModelAbilityError, ModelLoadError
from nip_astra.language_models.drawn import KeptTokens
from nip_astra.language_models.tokens import Counted as Counted
from nip_astra.language_models.tokens import Draw as Draw
from nip_astra.language_models.tokens import Drawn as Drawn
from nip_astra.language_models.tokens import Generation as Generation
from nip_astra.language_models.tokens import SamplingOptions as SamplingOptions
from nip_astra.language_models.tokens import TokenCount as TokenCount
from nip_astra.language_models.tokens import TokenScores as TokenScores
from nip_astra.language_models.tokens import Turns as Turns
from nip_astra.language_models.tokens import pad_left as pad_left
from nip_astra.language_models.tokens import pad_right as pad_right
from nip_astra.parameters.parameters_base import ComponentRegistry, PolymorphicParameters
from nip_astra.parameters.types import LanguageModelType


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
        """Sample turns as `TokenSampler.generate` does, and score spans of what is read.

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


class TokenModel(Counted, ABC):
    """A model that reads and says tokens; what it can do with them is said by its subclasses.

    Attributes
    ----------
    tokenizer
        A Hugging Face tokenizer.
    context_window : int
        Most tokens that context and continuation may have together.
    end_ids : tuple[int, ...]
        Tokens that end a turn.
    cache_bytes_per_token : int
        Memory that a session keeps for each token; 0 where it keeps none.
    can_be_forked : bool
        Whether a forked process may generate and score: there is no connection, device or thread
        behind the model, and `token_count` is all that generating changes.
    can_be_copied : bool
        Whether a copy in another process, sent there by pickle, may generate and score.
    is_in_this_process : bool
        Whether this process holds the weights, so that each process of a run has a model as this.
    can_score_contexts : bool
        Whether sessions give log-probabilities of spans of what is read.
    voices : Sequence[TokenModel]
        Models that speak in its place, each some of the turns.
    """

    class Parameters(PolymorphicParameters):
        """Parameters of the backend; a subclass adds its own."""

        type_name: ClassVar[str] = ""

    tokenizer: Any
    context_window: int
    end_ids: tuple[int, ...]
    cache_bytes_per_token: int = 0
    can_be_forked: bool = False
    can_be_copied: bool = False
    is_in_this_process: bool = False
    can_score_contexts: bool = True
    voices: Sequence[TokenModel] = ()

    @classmethod
    @abstractmethod
    def load(
        cls, parameters: Any, *, device: torch.device, scenario_dir: Path | None, trainable: bool
    ) -> TokenModel:
        """Load the model. Raises `ModelLoadError` where it cannot be found or read."""

    @abstractmethod
    def num_parameters(self) -> int:
        """The number of weights, trainable or not."""

    def shared_parts(self) -> list[object]:
        """What this model may share with others, so that copies of both share it too."""
        return [self.tokenizer, self.token_count]

    def to_send(self) -> TokenModel:
        """What is sent in place of the model where it is copied to another process."""
        return self

    def base_for(self, parameters: Any) -> TokenModel | None:
        """A frozen model on this one's weights where that is what `parameters` describe.

        None where it is another model, or where training changes the weights that would be shared.
        """
        return None

    def take_metrics(self) -> dict[str, float]:
        """What the backend has to log about its sampling since it was last asked."""
        return {}


class TokenSampler(TokenModel):
    """A model that draws tokens: what an agent needs to speak.

    One that can keep its caches between the levels of a tree gives `open_session` too.
    """

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

    @property
    def samples_as_it_scores(self) -> bool:
        """Whether `generate` gives the log-probabilities that `logprobs` would, up to rounding of
        float32. Where it does not, what is compared with a loss's is scored again.
        """
        return True


class _SeparateCalls(GenerationSession):
    """A session of a model that keeps nothing between calls."""

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
        before = [context[:start] for context, (start, _) in zip(contexts, spans, strict=True)]
        tokens = [context[a:b] for context, (a, b) in zip(contexts, spans, strict=True)]
        with torch.no_grad():
            scorer = as_scorer(
                self.model, role="model", to="tell how likely it finds what it reads"
            )
            scored = scorer.logprobs(*pad_left(before, cpu), *pad_right(tokens, cpu))
        return Turns(generation, scored.cpu())


class TokenScorer(TokenModel):
    """A model that tells how likely it finds tokens: what a reference or a teacher needs."""

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

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states that `token_scores` gives; 0 where it gives none."""
        return 0


class Learner(TokenModel):
    """A model whose weights training changes."""

    @abstractmethod
    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """The parameters that training may change; none for a frozen model."""

    @abstractmethod
    def frozen_reference(self) -> TokenModel:
        """A model that stays as this one is now; shares weights where it can."""

    def sampler_copy(self) -> LanguageModel:
        """A second model that samples as this one does now, and goes its own way.

        Raises
        ------
        ModelLoadError
            When this backend cannot be held twice.
        """
        raise ModelLoadError(
            "a second model that samples while this one learns was asked for, but the backend "
            f"{type(self).__name__} cannot be held twice. Set max_staleness to 0, or use the "
            "huggingface backend."
        )

    def weight_copy(self) -> dict[str, Tensor]:
        """The weights as they are now, for `take_weights` of a `sampler_copy`."""
        return {}

    def take_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take weights that `weight_copy` gave."""

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write what training changes, exactly, in Hugging Face layout."""

    @abstractmethod
    def restore(self, directory: Path) -> None:
        """Read back what `save` wrote. Raises `CheckpointError` where it does not fit."""

    @abstractmethod
    def save_pretrained(self, directory: Path) -> None:
        """Write a complete model and tokenizer for `AutoModelForCausalLM.from_pretrained`."""


class LanguageModel(TokenSampler, TokenScorer, Learner):
    """A causal language model with its tokenizer, which samples, scores and learns.

    What trains a model asks for all three.
    """


def as_sampler(model: TokenModel, *, role: str) -> TokenSampler:
    """The model, as one that speaks.

    Raises
    ------
    ModelAbilityError
        When it draws no tokens.
    """
    if not isinstance(model, TokenSampler):
        raise _lacks(model, role, "speak", "TokenSampler", "samples tokens")
    return model


def as_scorer(model: TokenModel, *, role: str, to: str) -> TokenScorer:
    """The model, as one that scores tokens.

    Parameters
    ----------
    to : str
        What for, for the message.

    Raises
    ------
    ModelAbilityError
        When it scores none.
    """
    if not isinstance(model, TokenScorer):
        raise _lacks(model, role, to, "TokenScorer", "gives log-probabilities of tokens")
    return model


def as_learner(model: TokenModel, *, role: str, to: str) -> Learner:
    """The model, as one whose weights can be changed, saved and restored.

    Raises
    ------
    ModelAbilityError
        When its weights stay as they are.
    """
    if not isinstance(model, Learner):
        raise _lacks(model, role, to, "Learner", "can be trained")
    return model


def as_language_model(model: TokenModel, *, role: str) -> LanguageModel:
    """The model, as one that is trained on what it says itself: it has every ability.

    Raises
    ------
    ModelAbilityError
        When it lacks one.
    """
    as_learner(model, role=role, to="learn")
    as_sampler(model, role=role)
    as_scorer(model, role=role, to="learn from the log-probabilities of what it says")
    # All that a `LanguageModel` adds is its name.
    return cast("LanguageModel", model)


def _lacks(model: TokenModel, role: str, to: str, ability: str, does: str) -> ModelAbilityError:
    found = [one.__name__ for one in _ABILITIES if isinstance(model, one)]
    parameters = getattr(type(model), "Parameters", None)
    name = getattr(parameters, "type_name", "") or type(model).__name__
    return ModelAbilityError(
        f"the {role} was to {to}, for which it takes a model that {does}, a {ability}, but the "
        f"backend {name!r} is {' and '.join(found) or 'none of the abilities'} only. Give the "
        f"{role} a backend that is a {ability}, for instance huggingface."
    )


_ABILITIES: tuple[type[TokenModel], ...] = (TokenSampler, TokenScorer, Learner)


LANGUAGE_MODELS: ComponentRegistry[type[TokenModel]] = ComponentRegistry(
    "language_model", package="nip_astra.language_models", members=LanguageModelType
)


def register_language_model(
    name: str,
) -> Callable[[type[TokenModel]], type[TokenModel]]:
    """Register a `TokenModel` subclass under the `_type` by which parameter files name it."""
    return LANGUAGE_MODELS.register(name)
