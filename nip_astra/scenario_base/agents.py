"""An agent is a language model with a role: a prompt format and a way of sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor

from nip_astra.errors import ContextLengthError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.base import (
    LANGUAGE_MODELS,
    Generation,
    GenerationSession,
    Learner,
    SamplingOptions,
    TokenModel,
    TokenSampler,
    TokenScorer,
    Turns,
    as_sampler,
    as_scorer,
)
from nip_astra.language_models.services.chat import CHAT_MODELS, ChatModel
from nip_astra.language_models.services.retrying import open_chat_model
from nip_astra.parameters.conditions import where_above, where_given
from nip_astra.parameters.parameters_base import PlainText, SubParameters, polymorphic
from nip_astra.scenario_base.chat_agent import ChatAgent
from nip_astra.scenario_base.conversation.tokens import (
    ChatFormat,
    ConversationFormat,
    FittedContext,
    PlainFormat,
    Turn,
)
from nip_astra.scenario_base.text.models import (
    PureTextSharedModelGroup as PureTextSharedModelGroup,
)
from nip_astra.utils.devices import resolve_device

LanguageModelParameters = polymorphic(LANGUAGE_MODELS.get, TokenModel.Parameters)
ChatModelParameters = polymorphic(CHAT_MODELS.get, ChatModel.Parameters)


class ConversationAgentParameters(SubParameters):
    """A language model, how it reads a conversation and how it speaks."""

    language_model: LanguageModelParameters  # type: ignore[valid-type]
    """The backend and its weights."""
    format: Annotated[Literal["chat", "plain"], where_given("language_model")] = "chat"
    """chat: the tokenizer's chat template. plain: turns one after the other."""
    system_prompt: PlainText | None = None
    """System message before the conversation (chat only)."""
    preamble: PlainText | None = None
    """User turn before the conversation, for chat templates that demand one."""
    turn_separator: PlainText = "\n"
    """What stands between turns in the plain format."""
    max_new_tokens: int = Field(default=32, ge=1)
    """Longest turn, in tokens."""
    min_new_tokens: Annotated[int, where_given("language_model")] = Field(default=1, ge=0)
    """Shortest turn, in tokens, before the turn may end."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_k: Annotated[int | None, where_above("temperature", 0), where_given("language_model")] = (
        Field(default=None, ge=1)
    )
    """Draw from the k most likely tokens only; null for all."""
    top_p: Annotated[float, where_above("temperature", 0)] = Field(default=1.0, gt=0, le=1)
    """Draw from the smallest set of likely tokens that holds this mass."""

    @field_validator("min_new_tokens")
    @classmethod
    def _fits_into_a_turn(cls, count: int, info: ValidationInfo) -> int:
        longest = info.data.get("max_new_tokens", count)
        if count > longest:
            raise ValueError(f"must be at most max_new_tokens, which is {longest}")
        return count


class TargetParameters(ConversationAgentParameters):
    """A language model under test, or a chat model that only answers messages.

    Of a chat model neither weights nor tokens are needed, nor log-probabilities.
    """

    language_model: LanguageModelParameters | None = None  # type: ignore[valid-type]
    """The backend and its weights; null where chat_model is given."""
    chat_model: ChatModelParameters | None = None  # type: ignore[valid-type]
    """A model that answers messages, for instance behind an API; null where language_model is."""
    temperature: float | None = Field(default=1.0, ge=0)  # type: ignore[assignment]  # checked
    """Sampling temperature; 0 is greedy, and null leaves it to the service of a chat model."""

    def check_model(self) -> Self:
        """Refuse two models and none."""
        if (self.language_model is None) is (self.chat_model is None):
            raise ValueError(
                "must have either a language_model or a chat_model; set the other one to null"
            )
        if self.temperature is None and self.chat_model is None:
            raise ValueError(
                "must have a temperature, which only a chat_model's service may choose"
            )
        return self


@dataclass
class ConversationAgent:
    """A speaker in a conversation."""

    role: str
    """attacker, target, reference or policy."""
    language_model: TokenModel
    conversation_format: ConversationFormat
    sampling: SamplingOptions
    num_truncated_contexts: int = 0
    """Contexts so far that lost their oldest turns to fit the model's window."""

    @property
    def token_sampler(self) -> TokenSampler:
        """The model, as one that speaks."""
        return as_sampler(self.language_model, role=self.role)

    def token_scorer(self, *, to: str) -> TokenScorer:
        """The model, as one that tells how likely it finds tokens.

        Parameters
        ----------
        to : str
            What for, for the message.
        """
        return as_scorer(self.language_model, role=self.role, to=to)

    def contexts(self, conversations: Sequence[Sequence[Turn]]) -> list[list[int]]:
        """The tokens before this agent's next turn, with room left for it."""
        room = self.language_model.context_window - self.sampling.max_new_tokens
        fitted: list[FittedContext] = [
            self.conversation_format.fit(turns, num_tokens=room) for turns in conversations
        ]
        self.num_truncated_contexts += sum(context.num_dropped_turns > 0 for context in fitted)
        return [context.ids for context in fitted]

    def speak(
        self,
        session: GenerationSession,
        contexts: Sequence[Sequence[int]],
        rows_per_context: int,
        uniforms_RT: Tensor,
        *,
        branching: int = 1,
        spans: Sequence[tuple[int, int]] | None = None,
    ) -> Turns:
        """Sample turns; see `GenerationSession.generate`."""
        return session.generate(
            contexts, rows_per_context, uniforms_RT, self.sampling, branching=branching, spans=spans
        )

    def content_ids(self, generation: Generation) -> list[tuple[int, ...]]:
        """Each turn's tokens without its end token."""
        ends = {*self.language_model.end_ids, *self.sampling.end_ids}
        rows = zip(generation.ids_BT.tolist(), generation.mask_BT.sum(dim=1).tolist(), strict=True)
        turns = [tuple(ids[:length]) for ids, length in rows]
        return [turn[:-1] if turn and turn[-1] in ends else turn for turn in turns]

    def say(self, text: str) -> list[int]:
        """The tokens of a turn that this agent is to have said, with the token that ends it."""
        end = self.conversation_format.turn_end(self.language_model.end_ids)
        return [*self.conversation_format.encode(text), *end]

    def num_tokens(self, text: str) -> int:
        """How many tokens of this agent's a text has."""
        return len(self.conversation_format.encode(text))

    def decode(self, turns: Sequence[Sequence[int]]) -> list[str]:
        """The text of turns."""
        decoded: list[str] = self.language_model.tokenizer.batch_decode(
            [list(ids) for ids in turns], skip_special_tokens=True
        )
        return [text.strip() for text in decoded]

    def shares_tokens_with(self, other: ConversationAgent) -> bool:
        """Say whether tokens of one agent mean the same to the other."""
        mine, theirs = self.language_model.tokenizer, other.language_model.tokenizer
        return mine is theirs or bool(mine.get_vocab() == theirs.get_vocab())

    def check_prompts(self, prompts: Sequence[str], *, split: str) -> None:
        """Raise `ContextLengthError` naming the first prompt that the window cannot hold.

        Parameters
        ----------
        split : str
            What the prompts are for, for the message: "train", "dev" or "test".
        """
        room = self.language_model.context_window - self.sampling.max_new_tokens
        for number, prompt in enumerate(prompts, start=1):
            turn = Turn(is_own=self.role == "target", ids=self.conversation_format.encode(prompt))
            num_tokens = len(self.conversation_format.context([turn]))
            if num_tokens > room:
                shown = prompt if len(prompt) <= 40 else f"{prompt[:40]}..."
                raise ContextLengthError(
                    f"{split} prompt {number} ({shown!r}) needs {num_tokens} tokens, but the "
                    f"{self.role}'s window of {self.language_model.context_window} leaves room "
                    f"for {room} beside its own turn of {self.sampling.max_new_tokens}. Shorten "
                    f"the prompt, or lower the {self.role}'s max_new_tokens."
                )


Speaker: TypeAlias = ConversationAgent | ChatAgent
"""Who can be a target."""


def build_agent(
    role: str, parameters: ConversationAgentParameters, language_model: TokenModel
) -> ConversationAgent:
    """The agent that speaks through a loaded model."""
    conversation_format = _build_format(parameters, language_model.tokenizer)
    return ConversationAgent(
        role=role,
        language_model=language_model,
        conversation_format=conversation_format,
        sampling=SamplingOptions(
            max_new_tokens=parameters.max_new_tokens,
            min_new_tokens=parameters.min_new_tokens,
            temperature=parameters.temperature,
            top_k=parameters.top_k,
            top_p=parameters.top_p,
            end_ids=conversation_format.end_ids,
        ),
    )


def build_reference(
    parameters: ConversationAgentParameters, language_model: TokenModel
) -> ConversationAgent:
    """The agent that stays what a model is now, and speaks and reads as that one does."""
    model = language_model
    if isinstance(model, Learner):
        model = model.frozen_reference()
    return build_agent("reference", parameters, model)


def load_language_model(
    parameters: Any, *, device: torch.device, scenario_dir: Path | None, trainable: bool
) -> TokenModel:
    """Load a backend's model by the type of its parameters."""
    cls = LANGUAGE_MODELS.get(parameters.type_name)
    return cls.load(parameters, device=device, scenario_dir=scenario_dir, trainable=trainable)


def build_target(
    parameters: TargetParameters,
    attacker_model: TokenModel | None,
    settings: ExperimentSettings,
    *,
    scenario_dir: Path | None,
) -> Speaker:
    """The target: a chat model, the attacker's base weights where both are the same, or a model.

    Parameters
    ----------
    attacker_model : TokenModel or None
        None where nothing is to be shared.
    """
    if parameters.chat_model is not None:
        model = open_chat_model(
            parameters.chat_model, settings, scenario_dir=scenario_dir, label="target"
        )
        return ChatAgent(
            "target",
            model,
            max_tokens=parameters.max_new_tokens,
            temperature=parameters.temperature,
            top_p=parameters.top_p,
            system_prompt=parameters.system_prompt,
            preamble=parameters.preamble,
        )
    device = resolve_device(settings.device)
    return build_agent(
        "target",
        parameters,
        load_target(parameters, attacker_model, device=device, scenario_dir=scenario_dir),
    )


def load_target(
    target: ConversationAgentParameters,
    attacker_model: TokenModel | None,
    *,
    device: torch.device,
    scenario_dir: Path | None,
) -> TokenModel:
    """Load the target, or share the attacker's base weights where both are the same model."""
    shared = attacker_model.base_for(target.language_model) if attacker_model is not None else None
    if shared is not None:
        return shared
    return load_language_model(
        target.language_model, device=device, scenario_dir=scenario_dir, trainable=False
    )


def _build_format(parameters: ConversationAgentParameters, tokenizer: Any) -> ConversationFormat:
    if parameters.format == "plain":
        return PlainFormat(tokenizer, separator=parameters.turn_separator)
    return ChatFormat(
        tokenizer, system_prompt=parameters.system_prompt, preamble=parameters.preamble
    )
