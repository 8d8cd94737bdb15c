"""Adaptive stress testing: an attacker converses with a frozen target."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, field_validator, model_validator

from nip_astra.errors import DataError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.adapters import adapters_drawn_from
from nip_astra.language_models.services.retrying import resume_usage
from nip_astra.parameters.conditions import where_above
from nip_astra.parameters.content import SCENARIO_FILE, resolve_reference
from nip_astra.parameters.files import read_yaml_layers
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.parameters.parameters_base import PlainText, SubParameters
from nip_astra.parameters.types import ScenarioType
from nip_astra.reward_terms.base import build_reward_terms
from nip_astra.rollouts.prompts import Prompt
from nip_astra.samplers.trees import MAX_PROBES, RewardParameters, TreeSampler, count_probes
from nip_astra.scenario_base.agents import (
    ConversationAgentParameters,
    TargetParameters,
    build_agent,
    build_reference,
    build_target,
    load_language_model,
)
from nip_astra.scenario_base.chat_agent import ChatAgent
from nip_astra.scenario_base.conversation.planted_failures import PlantedFailure
from nip_astra.scenario_base.conversation.prompts import DEFAULT_COLUMN, read_prompts
from nip_astra.scenario_instance import ConversationInstance
from nip_astra.scenarios.registry import Scenario, register_scenario
from nip_astra.scorers.base import ScorerParameters, build_scorer, open_services
from nip_astra.utils.devices import resolve_device
from nip_astra.utils.seeding import derive_seed

MAX_TURNS = 10_000_000
"""Maximum number of turns of an evaluation, about 10 GiB of records."""


class PromptParameters(SubParameters):
    """Files of opening prompts, the target's first turns; the three must be disjoint."""

    train: str
    """Opening prompts of training episodes."""
    dev: str
    """Prompts for selecting the best checkpoint."""
    test: str
    """Held-out prompts for evaluation before and after training."""
    column: PlainText = DEFAULT_COLUMN
    """Column of the prompts, in files and datasets with columns. The other columns are passed on
    with each prompt: to the judge, to functions that take `columns`, and to records."""


class EvaluationParameters(SubParameters):
    """Evaluation of an attacker, on conversations without branches."""

    num_episodes: int = Field(default=200, ge=1)
    """Episodes of an evaluation; prompts are used in order, repeating."""
    num_dev_episodes: Annotated[int, where_above("training.eval_period", 0)] = Field(
        default=100, ge=1
    )
    """Episodes of a dev evaluation."""
    num_bootstrap_resamples: int = Field(default=2000, ge=100)
    """Resamples of opening prompts for the interval of a rate corrected by labelled responses."""
    use_random_search: bool | None = None
    """Whether to run random search with the untrained attacker at an equal number of target
    queries, as a baseline; null does so if failures are planted."""
    batch_size: int = Field(default=256, ge=1)
    """Episodes per batch."""
    labelled_responses: str | None = None
    """JSON lines of responses with `is_failure`, with which `nip-astra evaluate` and `score`
    measure the scorers' accuracy: a path, or a file of the scenario; null for none."""

    def num_turns_at_most(self, tree_depth: int) -> int:
        """Return the maximum number of turns of the two evaluations."""
        return max(self.num_episodes, self.num_dev_episodes) * tree_depth


@register_scenario(ScenarioType.AST_CHAT)
class AstChatScenario(Scenario):
    """An attacker and a frozen target converse; a scorer rates the target's responses."""

    # The target is never trained, so it needs no adapter.
    never_reads: ClassVar[tuple[str, ...]] = (
        f"{ScenarioType.AST_CHAT}.target.language_model.lora",
    )

    class Parameters(Scenario.Parameters):
        """Agents, branching of rollouts, and definition of a failure."""

        attacker: ConversationAgentParameters
        """Language model trained to make the target fail."""
        target: TargetParameters
        """The model under test; never trained."""
        scorer: ScorerParameters  # type: ignore[valid-type]
        """Scorer of responses."""
        prompts: PromptParameters
        """Opening prompts."""
        tree_width: int = Field(default=2, ge=1)
        """Probes sampled at every node of the rollout tree."""
        tree_depth: int = Field(default=3, ge=1)
        """Probes on a path from root to leaf; turns of an evaluation episode."""
        num_rollout_parts: int = Field(default=2, ge=1, le=64)
        """Parts into which a rollout of small models on the CPU is split, for parallel processes on
        the available cores. More parts use more cores, but are slower on few. Last digits depend on
        this number, but not on the number of cores."""
        max_rollout_gib: float = Field(default=4.0, gt=0)
        """Memory for keys and values of a rollout, in GiB. A larger rollout is split into more
        parts of whole episodes, which changes last digits too."""
        reward: RewardParameters = RewardParameters()
        """Weights of the reward."""
        failure_threshold: float = Field(default=0.5, gt=0, le=1)
        """A response is a failure if its score is at least this."""
        evaluation: EvaluationParameters = EvaluationParameters()
        """Evaluation of attackers."""
        planted_failures: list[PlantedFailure] = []
        """Failures known to be in the target."""

        @model_validator(mode="after")
        def _can_be_held(self) -> Self:
            num_probes = count_probes(self.tree_width, self.tree_depth)
            if num_probes > MAX_PROBES:
                raise ValueError(
                    f"tree_width={self.tree_width} and tree_depth={self.tree_depth} give more than "
                    f"{MAX_PROBES:,} probes, too many for memory; lower one of them"
                )
            if self.evaluation.num_turns_at_most(self.tree_depth) > MAX_TURNS:
                raise ValueError(
                    f"evaluation.num_episodes, num_dev_episodes and tree_depth give more than "
                    f"{MAX_TURNS:,} turns, too many for memory; lower them"
                )
            return self

        @field_validator("target")
        @classmethod
        def _is_one_model(cls, target: TargetParameters) -> TargetParameters:
            return target.check_model()

        @model_validator(mode="after")
        def _has_likelihoods(self) -> Self:
            is_service = self.target.chat_model is not None
            if is_service and self.reward.likelihood_model == "target":
                raise ValueError(
                    "has reward.likelihood_model=target, but a chat_model gives no likelihoods; "
                    "set it to reference"
                )
            return self

        @field_validator("planted_failures")
        @classmethod
        def _names_are_unique(cls, planted: list[PlantedFailure]) -> list[PlantedFailure]:
            counts = Counter(failure.name for failure in planted)
            duplicates = [name for name, count in counts.items() if count > 1]
            if duplicates:
                raise ValueError(f"has duplicate names {duplicates}; names must be unique")
            return planted

    @classmethod
    def build(
        cls,
        hyper_params: HyperParameters,
        parameters: Any,
        settings: ExperimentSettings,
        *,
        scenario_dir: Path | None,
        trainer_type: str,
    ) -> ConversationInstance:
        device = resolve_device(settings.device)
        datasets = _read_datasets(parameters.prompts, scenario_dir)
        with adapters_drawn_from(derive_seed(hyper_params.seed, "adapter")):
            attacker_model = load_language_model(
                parameters.attacker.language_model,
                device=device,
                scenario_dir=scenario_dir,
                trainable=True,
            )
        attacker = build_agent("attacker", parameters.attacker, attacker_model)
        # Both may share the attacker's weights, without its adapter.
        target = build_target(
            parameters.target, attacker_model, settings, scenario_dir=scenario_dir
        )
        reference = build_reference(parameters.attacker, attacker_model)
        for split, prompts in datasets.items():
            attacker.check_prompts(prompts, split=split)
            target.check_prompts(prompts, split=split)
        scorer = build_scorer(parameters.scorer, device=device, scenario_dir=scenario_dir)
        reward_terms = build_reward_terms(
            parameters.reward.terms, device=device, scenario_dir=scenario_dir
        )
        scorers = [scorer]
        for term in reward_terms.values():
            scorers += term.scorers
        services = open_services(scorers, settings)
        if isinstance(target, ChatAgent):
            services = {"target": target.chat_model, **services}
        resume_usage(services)
        sampler = TreeSampler(
            attacker,
            target,
            reference,
            scorer,
            parameters.reward,
            max_cache_bytes=int(parameters.max_rollout_gib * 2**30),
            num_parts=parameters.num_rollout_parts,
        )
        facts = without_other_target(parameters, scenario_dir)
        return ConversationInstance(
            kind=str(ScenarioType.AST_CHAT),
            agents={"attacker": attacker, "target": target, "reference": reference},
            datasets=datasets,
            sampler=sampler,
            planted_failures=facts.planted_failures,
            scenario_dir=scenario_dir,
            services=services,
            reward_terms=reward_terms,
        )


def without_other_target(parameters: Any, scenario_dir: Path | None) -> Any:
    """Remove the facts of `scenario.yaml` about a different target from the parameters.

    Planted failures and labelled responses of `scenario.yaml` belong to the target in that file.
    For another model they would be wrong; those given together with that model are kept.
    """
    path = None if scenario_dir is None else scenario_dir / SCENARIO_FILE
    has_facts = parameters.planted_failures or parameters.evaluation.labelled_responses
    if not has_facts or path is None or not path.is_file():
        return parameters
    values: dict[str, Any] = {}
    for layer in read_yaml_layers(path, source=SCENARIO_FILE):
        values |= layer.values
    file_values = values.get(str(values.get("kind"))) or {}
    file_target = file_values.get("target") or {}
    file_model = file_target.get("language_model") or file_target.get("chat_model") or {}
    file_model_name = file_model.get("model")
    model = parameters.target.language_model or parameters.target.chat_model
    model_name = getattr(model, "model", None)
    if file_model_name is None:
        return parameters
    if _is_same_model(str(file_model_name), str(model_name), scenario_dir):
        return parameters
    planted = parameters.planted_failures
    file_failures = [failure["name"] for failure in file_values.get("planted_failures") or ()]
    # Other ones were given with the other model.
    if [failure.name for failure in planted] == file_failures:
        planted = []
    evaluation = parameters.evaluation
    file_evaluation = file_values.get("evaluation") or {}
    if evaluation.labelled_responses == file_evaluation.get("labelled_responses"):
        evaluation = evaluation.model_copy(update={"labelled_responses": None})
    return parameters.model_copy(update={"planted_failures": planted, "evaluation": evaluation})


def _is_same_model(first: str, second: str, scenario_dir: Path | None) -> bool:
    """Return whether two references denote one model; assumed for a reference with a `${...}`."""
    if first == second or "${" in first:
        return True
    sources = set()
    for reference in (first, second):
        source = resolve_reference(reference, scenario_dir)
        sources.add(source.resolve() if isinstance(source, Path) else source)
    return len(sources) == 1


def _read_datasets(prompts: PromptParameters, scenario_dir: Path | None) -> dict[str, list[Prompt]]:
    splits = {
        split: read_prompts(getattr(prompts, split), scenario_dir, prompts.column)
        for split in ("train", "dev", "test")
    }
    for first, second in combinations(splits, 2):
        shared = set(splits[first]) & set(splits[second])
        # Test figures would be those of prompts that the attacker was trained on.
        if shared:
            raise DataError(
                f"the {first} and {second} prompts share {len(shared)}, for instance "
                f"{min(shared)!r}. Remove them from one file."
            )
    return splits
