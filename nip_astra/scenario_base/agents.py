"""An agent is a language model with a role: a prompt format and a way of sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor

from nip_astra.errors import ContextLengthError
from nip_astra.language_models.base import (
    Generation,
    GenerationSession,
    LanguageModel,
    SamplingOptions,
    Turns,
)
from nip_astra.language_models.registry import LANGUAGE_MODELS
from nip_astra.parameters.conditions import where, where_above
from nip_astra.parameters.parameters_base import SubParameters, polymorphic
from nip_astra.scenario_base.conversation.tokens import (
    ChatFormat,
    ConversationFormat,
    FittedContext,
    PlainFormat,
    Turn,
)
from nip_astra.scenario_base.text.model_groups import (
    PureTextSharedModelGroup as PureTextSharedModelGroup,
)

LanguageModelParameters = polymorphic(LANGUAGE_MODELS.get, LanguageModel.Parameters)


class ConversationAgentParameters(SubParameters):
    """A language model, how it reads a conversation and how it speaks."""

    language_model: LanguageModelParameters  # type: ignore[valid-type]
    """The backend and its weights."""
    format: Literal["chat", "plain"] = "chat"
    """chat: the tokenizer's chat template. plain: turns one after the other."""
    system_prompt: Annotated[str | None, where("format", "chat")] = None
    """System message before the conversation (chat only)."""
    preamble: Annotated[str | None, where("format", "chat")] = None
    """User turn before the conversation, for chat templates that demand one."""
    turn_separator: Annotated[str, where("format", "plain")] = "\n"
    """What stands between turns in the plain format."""
    max_new_tokens: int = Field(default=32, ge=1)
    """Longest turn, in tokens."""
    min_new_tokens: int = Field(default=1, ge=0)
    """Shortest turn, in tokens, before the turn may end."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_k: Annotated[int | None, where_above("temperature", 0)] = Field(default=None, ge=1)
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


@dataclass
class ConversationAgent:
    """A speaker in a conversation.

    Attributes
    ----------
    role : str
        "attacker", "target" or "reference".
    num_truncated_contexts : int
        Contexts so far that lost their oldest turns to fit the model's window.
    """

    role: str
    language_model: LanguageModel
    conversation_format: ConversationFormat
    sampling: SamplingOptions
    num_truncated_contexts: int = 0

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


def build_agent(
    role: str, parameters: ConversationAgentParameters, language_model: LanguageModel
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


def load_language_model(
    parameters: Any, *, device: torch.device, scenario_dir: Path | None, trainable: bool
) -> LanguageModel:
    """Load a backend's model by the type of its parameters."""
    cls = LANGUAGE_MODELS.get(parameters.type_name)
    return cls.load(parameters, device=device, scenario_dir=scenario_dir, trainable=trainable)


def load_target(
    target: ConversationAgentParameters,
    attacker_model: LanguageModel,
    *,
    device: torch.device,
    scenario_dir: Path | None,
) -> LanguageModel:
    """Load the target, or share the attacker's base weights where both are the same model."""
    shared = attacker_model.base_for(target.language_model)
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
