"""A log that Inspect's viewer and data frames read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nip_astra.evaluation.exports.material import Material, missing, scores_of
from nip_astra.evaluation.measures import outcomes_of
from nip_astra.evaluation.outcomes import episode_outcome
from nip_astra.evaluation.rows import Episode


def write_inspect(material: Material, folder: Path) -> list[Path]:
    """Write `<evaluation>.eval`: a sample for each conversation, with the score of its worst turn.

    Raises
    ------
    MissingDependencyError
        When inspect_ai is not installed.
    """
    try:
        from inspect_ai import log
    except ImportError as error:
        raise missing("an Inspect log", "inspect_ai", "inspect") from error
    rate = material.figures.get("failure_rate") or {}
    metrics = {
        name: log.EvalMetric(name=name, value=rate[key])
        for name, key in (("failure_rate", "value"), ("low", "low"), ("high", "high"))
        if rate.get(key) is not None
    }
    scores = [log.EvalScore(name=material.scorer, scorer=material.scorer, metrics=metrics)]
    episodes = material.episodes
    written = log.EvalLog(
        status="success",
        eval=log.EvalSpec(
            created=material.created,
            task=f"{material.run_id}/{material.name}",
            dataset=log.EvalDataset(name=material.figures.get("split"), samples=len(episodes)),
            model=f"nip_astra/{material.target}",
            config=log.EvalConfig(),
            packages=_versions(material.environment),
            metadata={"attacker": material.figures.get("attacker", material.run_id)},
        ),
        results=log.EvalResults(
            total_samples=len(episodes), completed_samples=len(episodes), scores=scores
        ),
        samples=[_sample(episode, place, material) for place, episode in enumerate(episodes, 1)],
    )
    path = folder / f"{material.name}.eval"
    log.write_eval_log(written, str(path), format="eval")
    return [path]


def _sample(episode: Episode, place: int, material: Material) -> Any:
    from inspect_ai.log import EvalSample
    from inspect_ai.model import ChatMessageAssistant, ChatMessageUser, ModelOutput
    from inspect_ai.scorer import Score

    opening = ChatMessageAssistant(content=str(episode[0]["prompt"]))
    messages: list[Any] = [opening]
    for row in episode:
        messages.append(ChatMessageUser(content=str(row["probe"])))
        messages.append(ChatMessageAssistant(content=str(row["response"])))
    worst: dict[str, Score] = {}
    for row in episode:
        for name, value in scores_of(row, material).items():
            if value is not None and (name not in worst or value > worst[name].as_float()):
                worst[name] = Score(value=value, answer=str(row["response"]))
    return EvalSample(
        id=place,
        epoch=1,
        input=[opening],
        target="",
        messages=messages,
        output=ModelOutput.from_content(material.target, str(episode[-1]["response"])),
        scores=worst,
        metadata={
            "outcome": str(episode_outcome(outcomes_of(episode))),
            "outcomes": [str(row["outcome"]) for row in episode],
        },
    )


def _versions(environment: Mapping[str, Any]) -> dict[str, str]:
    packages = environment.get("packages") or {}
    return {name: version for name, version in packages.items() if version is not None}
