"""Parameters of agents that speak through chat models."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from nip_astra.language_models.services.chat import CHAT_MODELS, ChatModel
from nip_astra.parameters.conditions import where, where_given
from nip_astra.parameters.parameters_base import PlainText, SubParameters, polymorphic

ChatModelParameters = polymorphic(CHAT_MODELS.get, ChatModel.Parameters)


class TextAgentParameters(SubParameters):
    """An agent that speaks through a chat model."""

    model: ChatModelParameters  # type: ignore[valid-type]
    """The model that it starts with."""
    load_from_run: str | None = None
    """Run directory, or wandb://entity/project/run_id, whose trained model of the agent of the same
    name this one starts with; `model` says how it is held. Null starts with `model` as it is."""
    checkpoint_version: Annotated[str, where_given("load_from_run")] = "latest"
    """Which of that run's models: latest, or the name of one of its checkpoints, for instance
    step_00000015; on W&B a version or alias of its model, for instance v3."""
    shared_model_group: PlainText | None = None
    """Agents with equal names here share one model and its jobs; null leaves the agent to itself.
    They must agree in model, load_from_run, checkpoint_version, freeze_agent and
    fine_tune_from_scratch."""
    freeze_agent: bool = False
    """Whether the agent's model stays as it is."""
    fine_tune_from_scratch: Annotated[bool, where("freeze_agent", False)] = False
    """Whether each job starts from the model of the beginning, instead of from the last job's."""
    human_name: PlainText | None = None
    """What others call it; null takes its name in the protocol."""
    temperature: float = Field(default=1.0, ge=0)
    """Of sampling. Larger varies answers more; at 0 siblings of a tree are equal."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Answers are drawn from the smallest set of likely tokens that holds this mass."""
    max_tokens: int = Field(default=256, ge=1)
    """Longest answer, in tokens."""
    max_response_words: int = Field(default=150, ge=1)
    """Words that its prompt asks it to stay within."""
    num_invalid_generation_retries: int = Field(default=20, ge=0)
    """Further answers that are asked for in place of one that cannot be used. After them, the
    agent says nothing in this round."""
