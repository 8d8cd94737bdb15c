"""Agents in conversations: a language model with a role, a prompt format and sampling options."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

import torch
from pydantic import Field, JsonValue, ValidationInfo, field_validator

from nip_astra.errors import ContextLengthError, ModelAbilityError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.base import (
    LANGUAGE_MODELS,
    Generation,
    Learner,
    SamplingOptions,
    TokenModel,
    TokenSampler,
    TokenScorer,
    as_sampler,
    as_scorer,
)
from nip_astra.language_models.message_format import (
    ArgumentSchemas,
    MessageFormat,
)
from nip_astra.language_models.services.chat import ChatModelParameters
from nip_astra.language_models.services.retrying import open_chat_model
from nip_astra.language_models.sources import decode_all
from nip_astra.parameters.conditions import where, where_above, where_given
from nip_astra.parameters.parameters_base import (
    PlainText,
    ReasoningMarkers,
    SubParameters,
    polymorphic,
)
from nip_astra.rollouts.messages import Turn
from nip_astra.scenario_base.chat_agent import ChatAgent
from nip_astra.scenario_base.conversation.tokens import (
    ChatFormat,
    ConversationFormat,
    FittedContext,
    PlainFormat,
)
from nip_astra.scenario_base.text.models import (
    PureTextSharedModelGroup as PureTextSharedModelGroup,
)
from nip_astra.utils.devices import resolve_device

LanguageModelParameters = polymorphic(LANGUAGE_MODELS.get, TokenModel.Parameters)


class ConversationAgentParameters(SubParameters):
    """A language model with its prompt format and sampling."""

    language_model: LanguageModelParameters  # type: ignore[valid-type]
    """The backend and its weights."""
    format: Annotated[Literal["chat", "plain"], where_given("language_model")] = "chat"
    """chat: the tokenizer's chat template. plain: turns one after the other."""
    system_prompt: PlainText | None = None
    """System message before the conversation (chat only)."""
    preamble: PlainText | None = None
    """User turn before the conversation, for chat templates that demand one."""
    turn_separator: PlainText = "\n"
    """Text between turns in the plain format."""
    max_new_tokens: int = Field(default=32, ge=1)
    """Maximum length of a turn, in tokens."""
    min_new_tokens: Annotated[int, where_given("language_model")] = Field(default=1, ge=0)
    """Minimum length of a turn, in tokens."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_k: Annotated[int | None, where_above("temperature", 0), where_given("language_model")] = (
        Field(default=None, ge=1)
    )
    """Sample from the k most likely tokens only; null for all."""
    top_p: Annotated[float, where_above("temperature", 0)] = Field(default=1.0, gt=0, le=1)
    """Sample from the smallest set of most likely tokens with this probability mass."""
    reasoning_markers: Annotated[ReasoningMarkers, where_given("language_model")] = None
    """Texts that begin and end the model's reasoning, for instance ["<think>", "</think>"]; null
    for those of its chat template or tokenizer, an empty list for none: then all is text. Scorers,
    rewards, tools and later turns get a message without its reasoning."""
    template_options: Annotated[
        dict[str, JsonValue], where("format", "chat"), where_given("language_model")
    ] = {}
    """Variables of the chat template, for instance enable_thinking: false."""

    @field_validator("min_new_tokens")
    @classmethod
    def _fits_into_a_turn(cls, count: int, info: ValidationInfo) -> int:
        longest = info.data.get("max_new_tokens", count)
        if count > longest:
            raise ValueError(f"must be at most max_new_tokens, which is {longest}")
        return count


class TargetParameters(ConversationAgentParameters):
    """A language model under test, or a chat model without weights, tokens or log-probabilities."""

    language_model: LanguageModelParameters | None = None  # type: ignore[valid-type]
    """The backend and its weights; null with a chat_model."""
    chat_model: ChatModelParameters | None = None  # type: ignore[valid-type]
    """A model that answers messages, for instance behind an API; null with a language_model."""
    temperature: float | None = Field(default=1.0, ge=0)  # type: ignore[assignment]  # checked
    """Sampling temperature; 0 is greedy, null is the default of a chat model's service."""

    def check_model(self) -> Self:
        """Require exactly one model."""
        if (self.language_model is None) is (self.chat_model is None):
            raise ValueError(
                "must have either a language_model or a chat_model; set the other to null"
            )
        if self.temperature is None and self.chat_model is None:
            raise ValueError("must have a temperature; null is for a chat_model only")
        return self


@dataclass
class ConversationAgent:
    """A language model in a role."""

    role: str
    """attacker, target, reference or policy."""
    language_model: TokenModel
    conversation_format: ConversationFormat
    sampling: SamplingOptions
    num_truncated_contexts: int = 0
    """Contexts so far that lost their oldest turns to fit the model's window."""

    @property
    def message_format(self) -> MessageFormat:
        """Return how its turns are split into reasoning, text and calls."""
        return self.conversation_format.message_format

    @property
    def token_sampler(self) -> TokenSampler:
        """Return the model, which must be able to sample."""
        return as_sampler(self.language_model, role=self.role)

    def token_scorer(self, *, to: str) -> TokenScorer:
        """Return the model, which must be able to score tokens; errors name the purpose `to`."""
        return as_scorer(self.language_model, role=self.role, to=to)

    @property
    def room(self) -> int:
        """Return the number of tokens of the window that its next turn leaves for the context."""
        return self.language_model.context_window - self.sampling.max_new_tokens

    def contexts(
        self,
        conversations: Sequence[Sequence[Turn]],
        tools: Sequence[tuple[str, ...]] | None = None,
        continued: Sequence[bool] | None = None,
    ) -> list[list[int]]:
        """Return the tokens before this agent's next turn, leaving room for it.

        `tools` are those that the agent reads in each conversation, in OpenAI's form as JSON. Where
        `continued` is True, the conversation's last turn is the beginning of this agent's next one.
        """
        if tools:
            forms = [self.conversation_format.with_tools(agent_tools) for agent_tools in tools]
        else:
            forms = [self.conversation_format] * len(conversations)
        continued = continued or [False] * len(conversations)
        contexts = []
        for form, turns, is_begun in zip(forms, conversations, continued, strict=True):
            fitted = self.fit(turns, form=form, is_begun=is_begun)
            self.num_truncated_contexts += fitted.num_dropped_turns > 0
            contexts.append(fitted.ids)
        return contexts

    def fit(
        self,
        turns: Sequence[Turn],
        *,
        form: ConversationFormat | None = None,
        is_begun: bool = False,
    ) -> FittedContext:
        """Return the longest context that leaves room for this agent's next turn.

        If it `is_begun`, the last of the turns is its beginning.

        Raises
        ------
        ContextLengthError
            If not even the last turn fits.
        ModelAbilityError
            If a begun turn cannot be continued.
        """
        form = form or self.conversation_format
        if not is_begun:
            return form.fit(turns, num_tokens=self.room)
        if self.message_format.opens_thought:
            raise ModelAbilityError(
                f"{self.message_format.name} begins each answer with a thought, so it cannot "
                "continue the last assistant message of a prompt. Switch its thoughts off by "
                "template_options, or end the prompt with a user's message."
            )
        *before, beginning = turns
        fitted = form.fit(before, num_tokens=self.room - len(beginning.ids))
        return FittedContext([*fitted.ids, *beginning.ids], fitted.num_dropped_turns)

    def content_ids(self, generation: Generation) -> list[tuple[int, ...]]:
        """Return each turn's tokens without its end token."""
        end_ids = {*self.language_model.end_ids, *self.sampling.end_ids}
        lengths = generation.mask_BT.sum(dim=1).tolist()
        contents = []
        for ids, length in zip(generation.ids_BT.tolist(), lengths, strict=True):
            has_end = length > 0 and ids[length - 1] in end_ids
            num_content = length - 1 if has_end else length
            contents.append(tuple(ids[:num_content]))
        return contents

    def read_turns(
        self,
        generation: Generation,
        tools: Sequence[ArgumentSchemas | None] | None = None,
    ) -> list[Turn]:
        """Return the sampled turns, split into reasoning, text and calls.

        An answer without text and calls is missing if it ended within its reasoning, or was cut.
        `tools` has the schemas of each row's tools; without tools, calls are text.
        """
        contents = self.content_ids(generation)
        lengths = generation.mask_BT.sum(dim=1).tolist()
        texts = self._decode_with_marks(contents, with_calls=tools is not None)
        schemas = tools or [None] * len(contents)
        return [
            self._read_turn(ids, text, row_tools, is_cut=len(ids) == length)
            for ids, text, row_tools, length in zip(contents, texts, schemas, lengths, strict=True)
        ]

    def _read_turn(
        self, ids: tuple[int, ...], text: str, tools: ArgumentSchemas | None, *, is_cut: bool
    ) -> Turn:
        message_format = self.message_format
        if not message_format.has_marks and tools is None:
            return Turn("assistant", text.strip(), ids=ids)
        parsed = message_format.parse(text, tools=tools)
        reasoning_end = message_format.end_of_reasoning(text)
        is_silent = not parsed.text.strip() and not parsed.calls
        # A cut answer whose text has not begun is as unfinished as one within its reasoning.
        has_ended_early = parsed.is_unfinished or (is_cut and reasoning_end > 0)
        turn = Turn(
            "assistant",
            parsed.text.strip(),
            parsed.reasoning,
            parsed.calls,
            is_missing=is_silent and has_ended_early,
            ids=ids,
        )
        thought = message_format.thought
        has_later_thought = thought is not None and thought.opening in text[reasoning_end:]
        if reasoning_end == 0 and not has_later_thought:
            return turn
        turn = self._mark_reasoning(turn, text[:reasoning_end])
        if has_later_thought:
            # It is left out of a later context, too.
            return replace(turn, text_ids=self.conversation_format.encode(turn.text))
        return turn

    def _mark_reasoning(self, turn: Turn, reasoning: str) -> Turn:
        """Mark the turn's first tokens, of which the decoded text begins with the reasoning."""
        ids = turn.ids
        # The fewest tokens whose text is at least as long.
        num_tokens = bisect_left(
            range(len(ids)),
            len(reasoning),
            key=lambda number: len(self._decode_part(ids[:number])),
        )
        if self._decode_part(ids[:num_tokens]) != reasoning:
            # A token reaches across the end of the reasoning.
            rest = self._decode_part(ids)[len(reasoning) :].strip()
            text_ids = self.conversation_format.encode(rest)
            return replace(turn, num_reasoning_ids=num_tokens, text_ids=text_ids)
        # Whitespace after the reasoning belongs to it.
        while num_tokens < len(ids):
            next_text = self._decode_part(ids[num_tokens : num_tokens + 1])
            if next_text.strip():
                break
            num_tokens += 1
        return replace(turn, num_reasoning_ids=num_tokens)

    def _decode_part(self, ids: Sequence[int]) -> str:
        return self.message_format.decode(self.language_model.tokenizer, ids)

    def _decode_with_marks(
        self, turns: Sequence[tuple[int, ...]], *, with_calls: bool
    ) -> list[str]:
        """Return the texts of turns, with the special tokens that are marks."""
        mark_ids = set(self.message_format.shown_ids(with_calls=with_calls))
        if not mark_ids:
            return self._decode(turns)
        marked_texts: dict[tuple[int, ...], str] = {}
        for ids in turns:
            if not mark_ids.isdisjoint(ids):
                marked_texts[ids] = self._decode_part(ids)
        # The others together, which is faster.
        plain_texts = iter(self._decode([ids for ids in turns if ids not in marked_texts]))
        return [marked_texts[ids] if ids in marked_texts else next(plain_texts) for ids in turns]

    def heard_ids(self, text: str, ids: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """Return the tokens of another speaker's turn, cut where the window holds no more.

        Parameters
        ----------
        ids : tuple of int, optional
            Its tokens, if this model shares those of the speaker; else the text is tokenised, and
            may have more tokens than it had for the speaker.
        """
        if ids is None:
            ids = self.conversation_format.encode(text)
        # Almost all turns are so short that what a template adds need not be counted.
        if len(ids) <= self.room // 2:
            return ids
        max_length = self.conversation_format.longest_turn(self.room)
        self.num_truncated_contexts += len(ids) > max_length
        return ids[:max_length]

    def encode_turn(self, text: str) -> list[int]:
        """Return the tokens of a given turn of this agent, with its end token.

        If the chat template opens a thought, they end it: the text is no reasoning.
        """
        end_ids = self.conversation_format.turn_end(self.language_model.end_ids)
        message_format = self.message_format
        if message_format.opens_thought and message_format.thought is not None:
            text = f"\n{message_format.thought.closing}\n\n{text}"
        return [*self.conversation_format.encode(text), *end_ids]

    def tokenize(self, turns: Sequence[Turn]) -> list[Turn]:
        """Return turns with the tokens of their texts; roles are those of the chat template."""
        texts = [self.conversation_format.written_text(turn) for turn in turns]
        distinct_texts = list(dict.fromkeys(texts))
        encoded = self.conversation_format.encode_all(distinct_texts)
        ids_by_text = dict(zip(distinct_texts, encoded, strict=True))
        return [
            replace(turn, ids=ids_by_text[text]) for turn, text in zip(turns, texts, strict=True)
        ]

    def num_tokens(self, text: str) -> int:
        """Return the number of tokens of a text."""
        return len(self.conversation_format.encode(text))

    def decode(self, turns: Sequence[Sequence[int]]) -> list[str]:
        """Return the texts of turns, with their reasoning but without special tokens."""
        return [text.strip() for text in self._decode(turns)]

    def _decode(self, turns: Sequence[Sequence[int]]) -> list[str]:
        """Return the texts of turns, without special tokens."""
        # Turns of a rollout repeat; each is decoded once.
        distinct_turns = list(dict.fromkeys(map(tuple, turns)))
        decoded = decode_all(self.language_model.tokenizer, [list(ids) for ids in distinct_turns])
        texts = dict(zip(distinct_turns, decoded, strict=True))
        return [texts[tuple(ids)] for ids in turns]

    def shares_tokens_with(self, agent: ConversationAgent) -> bool:
        """Return whether both agents have the same vocabulary."""
        tokenizer = self.language_model.tokenizer
        agent_tokenizer = agent.language_model.tokenizer
        if tokenizer is agent_tokenizer:
            return True
        return bool(tokenizer.get_vocab() == agent_tokenizer.get_vocab())

    def opening_turns(self, ids: tuple[int, ...]) -> list[Turn]:
        """Return the turns of the shortest conversation that this agent reads, with a prompt."""
        if self.role != "target":
            return [Turn("user", ids=ids)]
        # The attacker's turn follows. Many templates refuse a conversation without a user.
        return [Turn("assistant", ids=ids), Turn("user")]

    def check_prompts(self, prompts: Sequence[str], *, split: str) -> None:
        """Raise `ContextLengthError` for the first prompt that exceeds the window."""
        encoded = self.conversation_format.encode_all(prompts)
        for number, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True), start=1):
            num_tokens = len(self.conversation_format.context(self.opening_turns(ids)))
            if num_tokens > self.room:
                excerpt = prompt if len(prompt) <= 40 else f"{prompt[:40]}..."
                raise ContextLengthError(
                    f"{split} prompt {number} ({excerpt!r}) has {num_tokens} tokens, but the "
                    f"{self.role}'s window of {self.language_model.context_window} leaves "
                    f"{self.room} before its turn of {self.sampling.max_new_tokens}. Shorten the "
                    f"prompt, or lower the {self.role}'s max_new_tokens."
                )


Speaker: TypeAlias = ConversationAgent | ChatAgent
"""A possible target."""


def build_agent(
    role: str, parameters: ConversationAgentParameters, language_model: TokenModel
) -> ConversationAgent:
    """Create an agent with a loaded model."""
    tokenizer = language_model.tokenizer
    conversation_format: ConversationFormat
    if parameters.format == "plain":
        conversation_format = PlainFormat(
            tokenizer,
            separator=parameters.turn_separator,
            reasoning_markers=parameters.reasoning_markers,
        )
    else:
        conversation_format = ChatFormat(
            tokenizer,
            system_prompt=parameters.system_prompt,
            preamble=parameters.preamble,
            template_options=parameters.template_options,
            reasoning_markers=parameters.reasoning_markers,
        )
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
    """Return a frozen copy of the agent's current state."""
    if isinstance(language_model, Learner):
        language_model = language_model.frozen_reference()
    return build_agent("reference", parameters, language_model)


def load_language_model(
    parameters: Any, *, device: torch.device, scenario_dir: Path | None, trainable: bool
) -> TokenModel:
    """Load a model by the type of its parameters."""
    cls = LANGUAGE_MODELS.get(parameters.type_name)
    return cls.load(parameters, device=device, scenario_dir=scenario_dir, trainable=trainable)


def build_target(
    parameters: TargetParameters,
    attacker_model: TokenModel | None,
    settings: ExperimentSettings,
    *,
    scenario_dir: Path | None,
) -> Speaker:
    """Build the target: a chat model, a model, or the attacker's base weights if it is the same."""
    if parameters.chat_model is not None:
        chat_model = open_chat_model(
            parameters.chat_model, settings, scenario_dir=scenario_dir, label="target"
        )
        return ChatAgent(
            "target",
            chat_model,
            max_tokens=parameters.max_new_tokens,
            temperature=parameters.temperature,
            top_p=parameters.top_p,
            system_prompt=parameters.system_prompt,
            preamble=parameters.preamble,
        )
    device = resolve_device(settings.device)
    language_model = load_target(
        parameters, attacker_model, device=device, scenario_dir=scenario_dir
    )
    return build_agent("target", parameters, language_model)


def load_target(
    target: ConversationAgentParameters,
    attacker_model: TokenModel | None,
    *,
    device: torch.device,
    scenario_dir: Path | None,
) -> TokenModel:
    """Load the target, or share the attacker's base weights if both are the same model."""
    if attacker_model is not None:
        shared_model = attacker_model.base_for(target.language_model)
        if shared_model is not None:
            return shared_model
    return load_language_model(
        target.language_model, device=device, scenario_dir=scenario_dir, trainable=False
    )
