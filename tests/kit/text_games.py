"""Games in words with made-up models, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.services.chat import (
    ChatAnswer,
    ChatFailure,
    ChatModel,
    ChatOutcome,
    ChatRequest,
    ChatUsage,
)
from nip_astra.language_models.services.fine_tuning import (
    Examples,
    FineTuningJob,
    FineTuningOptions,
    FineTuningService,
    JobStatus,
)
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.protocols.registry import PROTOCOL_HANDLERS, build_protocol_handler
from nip_astra.samplers.text_rollouts import TextNode, TextRolloutSampler
from nip_astra.scenario_base.text.game import PromptTemplate, TextEpisode, TextGame, load_prompts
from nip_astra.scenario_base.text.models import (
    PureTextSharedModelGroup,
    TextAgent,
    TextAgentParameters,
    group_agents,
)
from nip_astra.scenarios.pure_text_base import PureTextScenarioInstance
from nip_astra.tracking.local import LocalTracker
from nip_astra.tracking.run_directory import RunDirectory
from nip_astra.trainers.registry import TRAINERS
from nip_astra.trainers.rl_pure_text_base import PureTextRlTrainer
from nip_astra.utils.background_loop import BackgroundLoop
from nip_astra.utils.nested_array_dict import NestedArrayDict

PROMPTS = {
    "prover.jinja": (
        "{% block system %}You are {{ name }}. Argue for {{ stance }} of {{ datapoint.claim }}."
        "{% endblock %}{% block opening %}Begin.{% endblock %}"
        "{% block turn %}[{{ channels | join(', ') }}]{% endblock %}"
    ),
    "verifier.jinja": (
        "{% block system %}You are {{ name }}. At most {{ max_questions }} questions about "
        "{{ datapoint.claim }}.{% endblock %}{% block opening %}Begin.{% endblock %}"
        "{% block turn %}{% if is_last_turn %}Last turn: decide.{% elif may_decide %}Ask or decide."
        "{% else %}Ask.{% endif %}{% endblock %}"
    ),
}

Script = Callable[[ChatRequest, int], str | ChatAnswer | ChatFailure]


def accepting(name: str) -> Script:
    """The script of a model that says a number by the request's seed, and accepts at last."""

    def script(request: ChatRequest, number: int) -> str:
        is_last = "Last turn" in request.messages[-1]["content"]
        return "Decision: accept" if is_last else f"said {(request.seed or 0) % 97}"

    return script


@dataclass
class FakeChatModel(ChatModel):
    """Answers by a function of the request and the sample's index."""

    script: Script
    name: str = "fake"
    requests: list[ChatRequest] = field(default_factory=list)
    most_in_flight: int = 0
    tokens_per_answer: int = 1
    _in_flight: int = 0

    @classmethod
    def load(cls, parameters: Any, **_: Any) -> FakeChatModel:
        raise NotImplementedError

    async def answer(self, request: ChatRequest) -> ChatOutcome:
        self.requests.append(request)
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        await asyncio.sleep(0)
        self._in_flight -= 1
        answers = [self.script(request, number) for number in range(request.num_samples)]
        samples = tuple(ChatAnswer(one) if isinstance(one, str) else one for one in answers)
        return ChatOutcome(samples, ChatUsage(10, self.tokens_per_answer * len(samples)))


@dataclass
class FakeSpeaker:
    """An agent of the sampler."""

    model: ChatModel
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 16
    num_invalid_generation_retries: int = 2

    @property
    def parameters(self) -> FakeSpeaker:
        return self


@dataclass
class FakeFineTuning(FineTuningService):
    """Jobs that succeed at the second poll; the model is named after the job."""

    looks_needed: int = 2
    jobs: dict[str, FineTuningJob] = field(default_factory=dict)
    submitted: list[tuple[str, str, list[Any], FineTuningOptions]] = field(default_factory=list)
    _looks: dict[str, int] = field(default_factory=dict)

    async def submit(
        self, model: str, examples: Examples, options: FineTuningOptions, *, key: str
    ) -> FineTuningJob:
        if key not in self.jobs:
            self.submitted.append((key, model, list(examples), options))
            self.jobs[key] = FineTuningJob(key, JobStatus.QUEUED)
        return self.jobs[key]

    async def job(self, job_id: str) -> FineTuningJob:
        self._looks[job_id] = self._looks.get(job_id, 0) + 1
        if self._looks[job_id] >= self.looks_needed:
            done = replace(self.jobs[job_id], status=JobStatus.SUCCEEDED, model=f"tuned:{job_id}")
            self.jobs[job_id] = done
        return self.jobs[job_id]


def build_text_game(
    name: str,
    folder: Path,
    *,
    prompts: Mapping[str, str] = PROMPTS,
    has_random_stance: bool = False,
    **groups: Any,
) -> TextGame:
    """A game with the prompts above; `groups` are values of the hyper-parameters."""
    sections = {name: PROTOCOL_HANDLERS.get(name).Parameters}
    values = {"trainer": "none", "scenario": "none", "interaction_protocol": name} | groups
    hyper_params = HyperParameters.with_sections(sections).from_dict(values)
    protocol: Any = build_protocol_handler(hyper_params)
    for file, text in prompts.items():
        (folder / file).write_text(text, encoding="utf-8")
    agents = protocol.agent_names
    roles = {one: "verifier" if one in protocol.verifier_names else "prover" for one in agents}
    templates: dict[str, PromptTemplate] = load_prompts(folder, roles, name)
    return TextGame(
        protocol,
        templates,
        human_names={one: one.capitalize() for one in agents},
        max_words=dict.fromkeys(agents, 20),
        has_random_stance=has_random_stance,
    )


def play(
    game: TextGame,
    model: ChatModel | Mapping[str, ChatModel],
    episodes: Sequence[TextEpisode] | None = None,
    **options: Any,
) -> list[TextNode]:
    """Play episodes, by default one about a true claim with the seed 0."""
    names = game.protocol.agent_names
    by_agent = model if isinstance(model, Mapping) else dict.fromkeys(names, model)
    sampler = TextRolloutSampler(game, {name: FakeSpeaker(by_agent[name]) for name in names})
    if episodes is None:
        episodes = [game.start(0, {"y": 1, "claim": "the sky is blue"}, 0)]
    return asyncio.run(sampler.sample(episodes, key=("test",), **options))


CLAIMS = NestedArrayDict(
    {"y": [0, 1] * 6, "claim": [f"claim {n}" for n in range(12)], "level": [1, 1, 2] * 4}, 12
)


@dataclass
class TextParts:
    """An instance with made-up models, and their requests."""

    instance: PureTextScenarioInstance
    hyper_params: HyperParameters
    service: FakeFineTuning
    models: dict[str, FakeChatModel] = field(default_factory=dict)

    @property
    def num_requests(self) -> int:
        """Requests to all models."""
        return sum(len(model.requests) for model in self.models.values())


def build_text_parts(
    folder: Path,
    script: Callable[[str], Script],
    *,
    trainer: str = "pure_text_ei",
    protocol: str = "adp",
    agents: Mapping[str, Mapping[str, Any]] = {},
    service: FakeFineTuning | None = None,
    groups: Mapping[str, Any] = {},
) -> TextParts:
    """An instance of twelve claims, and hyper-parameters with values of `groups`.

    `script` returns a model's script by its name; "base" is the initial model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    read = (trainer, *TRAINERS.get(trainer).sections_of_others)
    sections = {
        protocol: PROTOCOL_HANDLERS.get(protocol).Parameters,
        **{name: TRAINERS.get(name).Parameters for name in read},
    }
    values = {"trainer": trainer, "scenario": "none", "interaction_protocol": protocol}
    small = {"num_iterations": 2, "rollouts_per_iteration": 6, "min_fine_tune_examples": 1}
    groups = {**groups, "text_rl": small | groups.get("text_rl", {})}
    hyper_params = HyperParameters.with_sections(sections).from_dict(values | groups)
    of_game = {name: groups[name] for name in (protocol, "protocol_common") if name in groups}
    game = build_text_game(protocol, folder, **of_game)
    models: dict[str, FakeChatModel] = {}

    def open_model(name: str | None) -> FakeChatModel:
        known = name or "base"
        return models.setdefault(known, FakeChatModel(script(known), known))

    default = {"model": {"_type": "scripted"}, "num_invalid_generation_retries": 2}
    members = [
        TextAgent(
            name,
            number,
            is_verifier=name in game.protocol.verifier_names,
            parameters=TextAgentParameters.from_dict(default | dict(agents.get(name, {}))),
        )
        for number, name in enumerate(game.protocol.agent_names)
    ]
    loop, service = BackgroundLoop(), service or FakeFineTuning()
    instance = PureTextScenarioInstance(
        kind="claims",
        agents={agent.name: agent for agent in members},
        protocol_handler=game.protocol,
        game=game,
        train_data=CLAIMS,
        test_data=CLAIMS[:8],
        shared_model_groups={
            name: PureTextSharedModelGroup(
                name, of_group, open_model=open_model, service=service, loop=loop
            )
            for name, of_group in group_agents(members).items()
        },
        loop=loop,
        groupings=("level",),
    )
    return TextParts(instance, hyper_params, service, models)


def build_text_trainer(
    parts: TextParts, run_directory: RunDirectory | None = None, **settings: Any
) -> PureTextRlTrainer:
    """The trainer that the hyper-parameters name."""
    chosen = ExperimentSettings(progress=False, run_directory=run_directory, **settings)
    cls = TRAINERS.get(parts.hyper_params.trainer)
    trainer = cls(parts.hyper_params, parts.instance, chosen)
    if run_directory is not None:
        trainer.tracker = LocalTracker(run_directory)
    return trainer
