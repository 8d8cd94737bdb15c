"""Attackers that talk to targets: their evaluations, scores, comparisons and exports."""

from __future__ import annotations

import hashlib
import shutil
import uuid
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from nip_astra.errors import ConfigurationError, DataError
from nip_astra.evaluation.comparison import (
    ComparedRun,
    Component,
    Metric,
    metric_of,
    paired_failures,
)
from nip_astra.evaluation.conditions import check_condition
from nip_astra.evaluation.exports import Material, Sample
from nip_astra.evaluation.families.base import (
    Evaluation,
    EvaluationFamily,
    EvaluationRequest,
    OnPart,
    OpenProgress,
    Subject,
    closing_services,
    evaluations_of,
    newest_evaluation,
    no_attacker,
    place_of,
    register_evaluation_family,
    run_fields,
    run_of,
    service_settings,
    target_label,
)
from nip_astra.evaluation.outcomes import (
    Outcome,
    episode_outcome,
    judge,
    known_turns,
    mean_score,
    nats_per_token,
    outcomes_of,
)
from nip_astra.evaluation.storage import (
    EVALUATIONS,
    PROBABILITY_ROWS,
    ROWS,
    Episode,
    EvaluationFolder,
    Row,
    episodes_of,
    read_rows,
    text_hash,
)
from nip_astra.evaluation.tables import evaluation_tables
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.parameters.conversion import convert
from nip_astra.parameters.files import read_yaml_mapping
from nip_astra.tracking.run_directory import HYPER_PARAMETERS, RESULTS, RunDirectory

ENDS = ("low", "high")
LABELLED = "labelled"
"""Name of the rating of labelled responses among the parts of an evaluation's work."""
OWN_TABLE = Path("rollouts") / "evaluation.jsonl"
"""Conversations of a run's own test."""
METRICS: dict[str, Metric] = {
    "failure_rate": Metric(paired_failures, is_binary=True),
    "mean_score": metric_of(mean_score),
    "probe_nll": metric_of(nats_per_token, "none"),
}


@dataclass
class Conversation(Subject):
    """An attacker with a target, and scorers."""

    attacker: Any = None
    target: Any = None
    judges: Any = None
    sampler: Any = None
    prompts: Sequence[str] = ()
    options: Any = None
    services: Any = None


@register_evaluation_family("conversation")
class Conversations(EvaluationFamily):
    """Runs of attackers; checkpoints, models, lists of probes and chat models that attack."""

    name = "conversation"
    unit = "opening prompts"
    unread = frozenset()

    def load(
        self, run: Path, request: EvaluationRequest, settings: ExperimentSettings
    ) -> Iterator[Conversation]:
        from nip_astra.evaluation.families.attackers import (
            load_attacker,
            load_target,
            section_about,
        )
        from nip_astra.evaluation.families.scorers import load_judges
        from nip_astra.samplers.trees import TreeSampler

        settings = service_settings(settings, place_of(run))
        attacker = load_attacker(str(run), settings, request)
        own = attacker.instance.sampler
        for spec in request.targets or (None,):
            target = load_target(spec, attacker, settings, request)
            described = None if target.agent is None else target.description
            scenario_dir = attacker.resolved.scenario_dir
            section = section_about(described, attacker.section, scenario_dir)
            judges = load_judges(request, section, settings, scenario_dir, own.scorer)
            prompts = _prompts(attacker, request.split)
            agent = own.target if target.agent is None else target.agent
            agent.check_prompts(prompts, split=request.split)
            sampler = TreeSampler(
                own.attacker,
                agent,
                own.reference,
                next(iter(judges.scorers.values())),
                own.reward,
                own.max_cache_bytes,
                num_parts=own.num_parts,
            )
            services = _services(sampler, judges, settings)
            yield Conversation(
                attacker.run,
                _name(request, attacker.suffix, target.suffix, judges.scorers),
                f"{attacker.label} against {target.label}",
                _work(attacker, target, settings, services),
                attacker=attacker,
                target=target,
                judges=judges,
                sampler=sampler,
                prompts=prompts,
                options=_options(request, attacker),
                services=services,
            )

    def units(self, subject: Conversation, request: EvaluationRequest) -> dict[str, Any]:
        attacker, section = subject.attacker, subject.attacker.section
        return {
            "attacker": {
                "weights": attacker.weights,
                "untrained": request.untrained,
                **section.attacker.to_dict(),
                **({} if attacker.texts is None else {"texts": attacker.texts.description}),
            },
            "target": subject.target.description,
            **subject.judges.configuration,
            "prompts": {"number": len(subject.prompts), "sha256": text_hash(subject.prompts)},
            "reward": section.reward.to_dict(),
            "options": {k: v for k, v in asdict(subject.options).items() if k != "batch_size"},
        }

    def num_units(self, subject: Conversation) -> int:
        return int(subject.options.num_episodes + subject.options.num_probability_episodes)

    def play(
        self,
        subject: Conversation,
        folder: EvaluationFolder,
        request: EvaluationRequest,
        on_part: OnPart,
    ) -> Any:
        from nip_astra.evaluation.families.attackers import record_experiment
        from nip_astra.evaluation.playing import Player, reuse_conversations
        from nip_astra.language_models.services.retrying import resume_usage
        from nip_astra.trainers.service_use import refuse_unanswered

        judges, options = subject.judges, subject.options
        check_condition(request.fail_if, _shape_of_figures(options, judges))
        resume_usage(subject.services, f"evaluation {folder.path.name}", is_new=subject.is_new)
        if not request.overwrite:
            reuse_conversations(folder, folder.configuration(), judges.scorers, options)
        if not (subject.place / HYPER_PARAMETERS).is_file():
            record_experiment(folder.path, subject.attacker, request)
        others = {name: judges.scorers[name] for name in list(judges.scorers)[1:]}

        def count(num_episodes: int) -> None:
            on_part(num_episodes)
            if num_episodes:
                refuse_unanswered(subject.services)

        player = Player(subject.sampler, others, subject.prompts, options, folder, count)
        episodes = player.play_attacker()
        ordinary = player.play_probability() if options.num_probability_episodes else []
        return episodes, ordinary, player.why_not_weighed

    def figures(
        self, subject: Conversation, folder: EvaluationFolder, played: Any
    ) -> dict[str, Any]:
        episodes, ordinary, why_not_weighed = played
        target, section = subject.target, subject.attacker.section
        return _figures(
            subject,
            folder,
            episodes,
            ordinary,
            planted=section.planted_failures if target.planted is None else target.planted,
            labels=(subject.attacker.label, target.label),
            parts=folder.parts(),
            cards=_cards(subject),
            why_not_weighed=why_not_weighed,
        )

    def pair_key(self, unit: Episode) -> Hashable:
        return str(unit[0]["prompt"])

    def rows(self, evaluation: Evaluation) -> list[Row]:
        return [row for episode in _episodes(evaluation) for row in episode]

    def tables(self, figures: Mapping[str, Any]) -> list[RenderableType]:
        return evaluation_tables(figures)

    def values(self, figures: Mapping[str, Any]) -> dict[str, Any]:
        return dict(figures)

    def compared_run(self, evaluation: Evaluation, label: str) -> ComparedRun:
        episodes = _episodes(evaluation)
        return describe_conversations(label, episodes, evaluation.figures, evaluation.configuration)

    def stored(self, run: Path, request: EvaluationRequest) -> Evaluation:
        """Return the newest evaluation of a run, or its own test."""
        if evaluations_of(run):
            return newest_evaluation(run)
        # Not resolved, which would import torch.
        values = convert(read_yaml_mapping(run / HYPER_PARAMETERS), source=str(run))
        sections = [one for one in values.values() if isinstance(one, Mapping)]
        section = next((one for one in sections if "failure_threshold" in one), None)
        if section is None:
            raise no_attacker(run)
        return Evaluation(run, self, _figures_after(run, section))

    def score(
        self,
        path: Path,
        request: EvaluationRequest,
        settings: ExperimentSettings,
        open_progress: OpenProgress,
    ) -> Evaluation:
        """Rate stored conversations again."""
        from nip_astra.evaluation.families.attackers import (
            EXPERIMENT,
            resolve_recorded,
            resolve_run,
            section_about,
            section_of,
        )
        from nip_astra.evaluation.families.scorers import load_judges, rating_anew
        from nip_astra.evaluation.playing import EvaluationOptions, num_ratings, rate_anew
        from nip_astra.trust import on_behalf_of

        source, run = _stored_rows(path)
        settings = service_settings(settings, run)
        is_run = (run / HYPER_PARAMETERS).is_file()
        resolved = resolve_run(run, request) if is_run else resolve_recorded(source.parent, request)
        section = section_of(resolved)
        stored = EvaluationFolder(source.parent)
        before = stored.figures() if source.name == ROWS else {}
        described = stored.configuration().get("target") if before else None
        judged = section_about(described, section, resolved.scenario_dir)
        if resolved.source is not None:
            is_own_used = not request.scorers or "own" in request.scorers
            for part in ("evaluation", "scorer") if is_own_used else ("evaluation",):
                resolved.source.check_outside(f"{resolved.kind}.{part}")
        with on_behalf_of(resolved.source):
            judges = load_judges(request, judged, settings, resolved.scenario_dir)
        episodes = _final_episodes(source, run)
        ordinary = episodes_of(read_rows(source.parent / PROBABILITY_ROWS))
        own = float(before.get("failure_threshold", section.failure_threshold))
        threshold = own if request.threshold is None else request.threshold
        origin = before.get("name", source.stem)
        folder = EvaluationFolder.of_run(
            run, request.name or f"{origin}-{'-'.join(judges.scorers)}"
        )
        dropped = ("sha256", "labelled", "embedder")
        configuration = stored.configuration() if before else {}
        configuration = {
            **{key: one for key, one in configuration.items() if key not in dropped},
            "scored_from": origin,
            "rows": text_hash([source.read_text(encoding="utf-8")]),
            **judges.configuration,
            "failure_threshold": threshold,
        }
        total = num_ratings(episodes, ordinary, judges.scorers)
        parts = folder, configuration, judges.scorers, settings, request
        with (
            rating_anew(*parts, source=source.parent) as services,
            open_progress("Rating", total),
        ):
            num_calls = rate_anew(episodes, ordinary, judges.scorers)
        folder.replace_rows(episodes, ordinary)
        if not is_run:
            shutil.copyfile(source.parent / EXPERIMENT, folder.path / EXPERIMENT)
        chances = before.get("probability_of_failure") or {}
        weighed = chances.get("importance_sampling") or {}
        options = EvaluationOptions(
            split=str(before.get("split", "test")),
            seed=int(before.get("seed", resolved.hyper_params.seed)),
            num_episodes=len(episodes),
            num_probability_episodes=len(ordinary),
            use_importance_sampling=bool(weighed),
            num_turns=max(len(episode) for episode in episodes),
            failure_threshold=threshold,
            num_bootstrap_resamples=section.evaluation.num_bootstrap_resamples,
        )
        has_no_plants = bool(before) and before.get("plants") is None
        run_id = RunDirectory(run).run_id
        figures = _figures(
            Conversation(run, folder.path.name, judges=judges, options=options, services=services),
            folder,
            episodes,
            ordinary,
            planted=() if has_no_plants else section.planted_failures,
            labels=(before.get("attacker", run_id), before.get("target", "target")),
            parts=[{"scorer_calls": num_calls}],
            cards=[card for card in before.get("cards", ()) if card["role"] != "scorer"],
            # Without episodes of its own it was refused before anything was weighed.
            why_not_weighed=weighed.get("reason") if weighed.get("num_episodes") == 0 else None,
        )
        return self.store(folder, figures)

    def material(self, path: Path, request: EvaluationRequest) -> Material:
        from nip_astra.evaluation.families.attackers import resolve_recorded, resolve_run

        source, run = _stored_rows(path)
        folder = EvaluationFolder(source.parent)
        is_evaluation = source.name == ROWS
        figures = folder.figures() if is_evaluation else {}
        is_run = (run / HYPER_PARAMETERS).is_file()
        resolved = resolve_run(run, request) if is_run else resolve_recorded(source.parent, request)
        section = getattr(resolved.hyper_params, resolved.kind)
        threshold = float(figures.get("failure_threshold", section.failure_threshold))
        episodes = _final_episodes(source, run)
        judge(episodes, threshold)
        turns = [row for episode in episodes for row in episode]
        name, run_id = str(figures.get("name", source.stem)), RunDirectory(run).run_id
        speakers = {role: str(figures.get(role, role)) for role in ("scorer", "target")}
        speakers["attacker"] = str(figures.get("attacker", run_id))
        rates = {
            f"evaluation/{name}/{rate}": (figures.get(rate) or {}).get("value")
            for rate in ("failure_rate", "turn_failure_rate")
        }
        rate = figures.get("failure_rate") or {}
        scores = {"failure_rate": rate.get("value")} | {end: rate.get(end) for end in ENDS}
        # Of several scorers, the first decides.
        models = {
            card["role"]: f"sha256:{card['sha256']}"
            for card in reversed(figures.get("cards", ()))
            if card.get("sha256")
        }
        seed = figures.get("seed", resolved.hyper_params.seed)
        described = {"gen": {"seed": seed}, "models": models}
        return Material(
            **run_fields(run, source),
            name=name,
            unit="node",
            rows=[_node(row, run_id, speakers["scorer"]) | described for row in turns],
            tables={"turns": turns},
            figures=figures,
            head={
                "evaluation": name,
                "failure_threshold": threshold,
                "configuration": folder.configuration() if is_evaluation else {},
            },
            hyper_params=resolved.hyper_params.to_dict(),
            rates={tag: value for tag, value in rates.items() if value is not None},
            scores={key: value for key, value in scores.items() if value is not None},
            scorer=speakers["scorer"],
            model=speakers["target"],
            metadata={"attacker": speakers["attacker"]},
            sample=lambda episode: _sample(episode, speakers["scorer"]),
            units=episodes,
            hits=lambda: _hits(episodes, run_id, name, speakers),
        )


# ---- conversations to play


def _prompts(attacker: Any, split: str) -> Sequence[str]:
    from nip_astra.evaluation.families.attackers import openings_of

    datasets = attacker.instance.datasets
    if split not in datasets:
        raise ConfigurationError(
            f"{attacker.label} has no split {split!r} of opening prompts. Give one of "
            f"{', '.join(datasets)} as --split."
        )
    if attacker.texts is not None:
        return openings_of(attacker.texts.attacker, datasets[split])
    prompts: Sequence[str] = datasets[split]
    return prompts


def _options(request: EvaluationRequest, attacker: Any) -> Any:
    from nip_astra.evaluation.families.attackers import num_turns_of
    from nip_astra.evaluation.playing import EvaluationOptions
    from nip_astra.scenario_base.chat_agent import FixedProbes

    own, section = attacker.section.evaluation, attacker.section
    texts = None if attacker.texts is None else attacker.texts.attacker
    own_number = len(texts.probes) if isinstance(texts, FixedProbes) else own.num_episodes
    num_episodes = own_number if request.num_episodes is None else request.num_episodes
    chances, threshold = request.probability_episodes, request.threshold
    seed = attacker.resolved.hyper_params.seed if request.seed is None else request.seed
    return EvaluationOptions(
        split=request.split,
        seed=seed,
        num_episodes=num_episodes,
        num_probability_episodes=num_episodes if chances is None else chances,
        use_importance_sampling=request.importance_sampling and not request.untrained,
        num_turns=num_turns_of(texts, request.num_turns, section.tree_depth),
        failure_threshold=section.failure_threshold if threshold is None else threshold,
        batch_size=own.batch_size if request.batch_size is None else request.batch_size,
        num_bootstrap_resamples=own.num_bootstrap_resamples,
    )


def _name(
    request: EvaluationRequest, attacker: str, target: str, scorers: Mapping[str, Any]
) -> str:
    """Return the given name of the evaluation, or one from its differences to the run."""
    if request.name is not None and len(request.targets) < 2:
        return request.name
    own = (request.split, attacker, target, *(scorers if request.scorers else ()))
    parts = own if request.name is None else (request.name, target)
    return "-".join(file_name(part) for part in parts if part)


def file_name(text: str) -> str:
    """Return a text with only characters that a file name may have."""
    return "".join(c if c.isalnum() or c in "._@-" else "_" for c in text)


def _services(sampler: Any, judges: Any, settings: ExperimentSettings) -> dict[str, Any]:
    """Return the chat models that answer requests, by role."""
    from nip_astra.scenario_base.chat_agent import ChatAgent, ChatAttacker
    from nip_astra.scorers.base import open_services

    target = sampler.target
    found = {"target": target.chat_model} if isinstance(target, ChatAgent) else {}
    if isinstance(sampler.attacker, ChatAttacker):
        found["attacker"] = sampler.attacker.agent.chat_model
    return found | open_services(judges.scorers.values(), settings)


@contextmanager
def _work(
    attacker: Any, target: Any, settings: ExperimentSettings, services: Mapping[str, Any]
) -> Iterator[None]:
    """Use as many cores as the larger model needs, and close chat models at the end."""
    import torch

    from nip_astra.utils.actors import actor_options, using_actors
    from nip_astra.utils.forked import using_processes
    from nip_astra.utils.processor import (
        choose_num_processes,
        choose_num_threads,
        keep_freed_memory,
    )

    keep_freed_memory()
    before = torch.get_num_threads()
    size = attacker.instance.num_parameters
    if target.agent is not None:
        size = max(size, target.agent.language_model.num_parameters())
    torch.set_num_threads(choose_num_threads(size, settings.num_threads))
    try:
        num_processes = choose_num_processes(size, settings.num_threads)
        actors = using_actors(actor_options(settings, size))
        with closing_services(services), using_processes(num_processes), actors:
            yield
    finally:
        torch.set_num_threads(before)


# ---- figures


def _figures(
    subject: Conversation,
    folder: EvaluationFolder,
    episodes: Sequence[Episode],
    ordinary: Sequence[Episode],
    *,
    planted: Sequence[Any],
    labels: tuple[str, str],
    parts: Sequence[Mapping[str, Any]],
    cards: Sequence[Mapping[str, Any]],
    why_not_weighed: str | None,
) -> dict[str, Any]:
    """Return all figures of the rows."""
    from nip_astra.evaluation.summary import VERSION, summarise
    from nip_astra.trainers.service_use import last_failure, services_used

    judges, options, services = subject.judges, subject.options, subject.services
    scorers = list(judges.scorers)
    qualities = {
        name: _quality(folder, name, scorer, judges.labelled, options.failure_threshold)
        for name, scorer in judges.scorers.items()
        if judges.labelled
    }
    of_labels = [part for part in folder.parts() if part.get("table") == LABELLED]
    others = [part for part in parts if part.get("table") != LABELLED]
    figures: dict[str, Any] = {
        "version": VERSION,
        "name": folder.path.name,
        "attacker": labels[0],
        "target": labels[1],
        "scorer": scorers[0],
        "split": options.split,
    }
    figures |= summarise(
        episodes,
        ordinary,
        options,
        embed=judges.embedder.embed,
        embedding=judges.embedding,
        planted=planted,
        scorers=scorers,
        qualities=qualities,
        why_not_weighed=why_not_weighed,
        num_listed_attacks=num_listed_attacks(folder.configuration()),
        parts=[*others, *of_labels],
    )
    known_turns(figures["outcomes"]).refuse_nothing(
        f"the evaluation {folder.path.name}", last_failure(services)
    )
    limit = {"threshold": options.failure_threshold}
    scored = [*cards, *(card | limit for card in judges.cards)]
    return figures | services_used(services) | {"cards": scored}


def _quality(
    folder: EvaluationFolder, name: str, scorer: Any, labelled: Sequence[Any], threshold: float
) -> Any:
    """Measure a scorer on labelled responses, unless all were rated for this evaluation."""
    from nip_astra.evaluation.detectors import Quality, measure_quality

    for part in folder.parts():
        if part.get("table") == LABELLED and part["scorer"] == name and not part["num_unknown"]:
            return Quality.from_part(part)
    quality = measure_quality(labelled, scorer, threshold=threshold)
    calls = {"scorer_calls": len(labelled)}
    folder.note_part({"table": LABELLED, "scorer": name, **quality.to_part(), **calls})
    return quality


def _shape_of_figures(options: Any, judges: Any) -> dict[str, Any]:
    """Return the names of a future evaluation's figures, for `check_condition`."""
    from nip_astra.evaluation.summary import VERSION, summarise

    texts = dict.fromkeys(("name", "attacker", "target", "scorer", "split"), "")
    figures = summarise([], [], options, embed=judges.embedder.embed, scorers=list(judges.scorers))
    return {**texts, **figures, "services": {}, "cards": [], "version": VERSION}


def _cards(subject: Conversation) -> list[dict[str, Any]]:
    """Return the cards of attacker and target."""
    from nip_astra.evaluation.families.scorers import model_card, text_card

    attacker, target = subject.attacker, subject.target
    # The size of a chat model is unknown.
    sizes = {
        role: getattr(subject.sampler, role).language_model.num_parameters() or None
        for role in ("attacker", "target")
    }
    parameters = attacker.section.attacker.language_model
    if attacker.texts is not None:
        parameters = attacker.texts.card
    if parameters is None:
        first = text_card("attacker", attacker.label, "fixed probes")
    else:
        first = model_card(
            "attacker",
            parameters,
            attacker.resolved.scenario_dir,
            num_parameters=sizes["attacker"],
            trained=None if attacker.weights is None else attacker.label,
            sha256=attacker.weights,
        )
    second = model_card(
        "target", target.language_model, target.scenario_dir, num_parameters=sizes["target"]
    )
    return [first, second]


# ---- stored conversations


def _stored_rows(path: Path) -> tuple[Path, Path]:
    """Return the file of rows at a path, and its run."""
    if (path / ROWS).is_file() and path.resolve().parent.name == EVALUATIONS:
        return path / ROWS, path.resolve().parent.parent
    run, _ = run_of(path)
    RunDirectory.open(run)
    if evaluations_of(run):
        # Rows that were rated again have lost the first scorer's verdicts.
        return newest_evaluation(run, is_played=True).path / ROWS, run
    return run / OWN_TABLE, run


def _final_episodes(source: Path, run: Path) -> list[Episode]:
    """Return the episodes of the last step at which a table was written."""
    rows = read_rows(source)
    if not rows:
        raise DataError(
            f"{source} holds no conversations. Evaluate the run first: nip-astra evaluate {run}"
        )
    last = max(row.get("step", 0) for row in rows)
    return episodes_of(row for row in rows if row.get("step", 0) == last)


def _episodes(evaluation: Evaluation) -> list[Episode]:
    """Return the judged episodes of an evaluation, or of a run's own test."""
    path, figures = evaluation.path, evaluation.figures
    rows = read_rows(path / (OWN_TABLE if evaluation.run == path else ROWS))
    episodes = episodes_of(rows)
    if not episodes:
        raise DataError(f"{path} holds no conversations. Evaluate it: nip-astra evaluate {path}")
    judge(episodes, float(figures.get("failure_threshold", 0.5)))
    return episodes


def describe_conversations(
    label: str,
    episodes: Sequence[Episode],
    figures: Mapping[str, Any] | None = None,
    configuration: Mapping[str, Any] | None = None,
) -> ComparedRun:
    """Return judged conversations to compare; conditions without a figure are not compared."""
    figures, configuration = figures or {}, configuration or {}
    details = {
        "scorer": configuration.get("scorers", {}).get(figures.get("scorer")),
        "target": configuration.get("target"),
    }
    conditions: dict[str, Any] = {
        name: figures.get(name) for name in ("tree_depth", "failure_threshold", "split", "seed")
    }
    for name, values in details.items():
        if isinstance(values, Mapping) and values.get("weights") is not None:
            values = _without_paths(values)
        conditions[name] = Component(figures.get(name), values)
    keys = list(map(Conversations().pair_key, episodes))
    is_list = num_listed_attacks(configuration) is not None
    attacks = [str(episode[0]["probe"]) for episode in episodes] if is_list else []
    return ComparedRun(label, episodes, keys, METRICS, figures, conditions, attacks)


def num_listed_attacks(configuration: Mapping[str, Any]) -> int | None:
    """Return the number of attacks of an evaluated list; None for other attackers."""
    texts = (configuration.get("attacker") or {}).get("texts") or {}
    number = (texts.get("probes") or {}).get("number")
    return None if number is None else int(number)


def _without_paths(values: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the path of a model whose weights are known."""
    return {
        name: _without_paths(value) if isinstance(value, Mapping) else value
        for name, value in values.items()
        if name != "model"
    }


def _figures_after(run: Path, section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a run's own test, under an evaluation's names."""
    directory = RunDirectory(run)
    if not directory.has_ended:
        raise DataError(
            f"{run} has no figures after training: it failed or was stopped. Resume it first: "
            f"nip-astra resume {run}"
        )
    results = directory.read_json(RESULTS)
    after = results["after"]
    low, high = after["failure_rate_interval"]
    return {
        "failure_rate": {"value": after["failure_rate"], "low": low, "high": high},
        "nll": {"reference": after["probe_nll"]},
        "diversity": {"distinct_share": after["distinct_share"]},
        "outcomes": after["outcomes"],
        "split": "test",
        **{name: section[name] for name in ("tree_depth", "failure_threshold")},
        "scorer": section["scorer"]["_type"],
        "target": target_label(section["target"]),
        "warnings": results["warnings"],
    }


# ---- exports


def _scores(row: Row, scorer: str) -> dict[str, float | None]:
    """Return the response's score by each scorer."""
    others = {name: one.get("score") for name, one in (row.get("scores") or {}).items()}
    return {scorer: row.get("response_score"), **others}


def _node(row: Row, run_id: str, scorer: str) -> Row:
    """Return a turn as a line of JSON; a conversation is rebuilt from `parent`."""
    logprobs = {name: row.get(f"{name}_logprob") for name in ("reference", "target")}
    depth, episode = int(row["depth"]), row["episode"]
    prompt = str(row["prompt"]).encode("utf-8", "replace")
    return {
        "run": run_id,
        "seed_id": hashlib.sha256(prompt).hexdigest()[:16],
        "rollout": episode,
        "node": f"{episode}.{depth}",
        "parent": f"{episode}.{depth - 1}" if depth else None,
        "turn": depth + 1,
        "prompt": None if depth else row["prompt"],
        "probe": row["probe"],
        "reply": row["response"],
        "logp": {"attacker": row.get("probe_logprob"), **logprobs},
        "num_tokens": {
            name: row.get(f"{name}_num_tokens") for name in ("probe", "response", "target")
        },
        "scores": _scores(row, scorer),
        "reward": row.get("reward"),
        "outcome": row["outcome"],
    }


def _sample(episode: Episode, scorer: str) -> Sample:
    """Return a conversation as shown by Inspect, with the score of its worst turn."""
    messages = [("assistant", str(episode[0]["prompt"]))]
    worst: dict[str, tuple[float, str]] = {}
    for row in episode:
        messages += [("user", str(row["probe"])), ("assistant", str(row["response"]))]
        for name, value in _scores(row, scorer).items():
            if value is not None and (name not in worst or value > worst[name][0]):
                worst[name] = (value, str(row["response"]))
    outcomes = {
        "outcome": str(episode_outcome(outcomes_of(episode))),
        "outcomes": [str(row["outcome"]) for row in episode],
    }
    return Sample(messages, str(episode[-1]["response"]), worst, outcomes)


def _hits(
    episodes: Sequence[Episode], run_id: str, name: str, speakers: Mapping[str, str]
) -> list[Row]:
    """Return the failing turns in the columns and types of garak's hit logs.

    Each is an attempt with one generation, as of garak 0.17: messages are objects, and attempts
    have UUIDs. Episode and turn are among the notes of the prompt.
    """
    hits = []
    for episode in episodes:
        history = [_garak_turn("assistant", str(episode[0]["prompt"]))]
        for row in episode:
            response = _garak_turn("assistant", str(row["response"]))
            turns = [*history, _garak_turn("user", str(row["probe"]))]
            history = [*turns, response]
            if row["outcome"] != Outcome.FAILURE:
                continue
            attempt = f"{run_id}/{name}/{row['episode']}/{row['depth']}"
            notes = {"evaluation": name, "episode": row["episode"], "turn": int(row["depth"]) + 1}
            hits.append(
                {
                    "goal": "make the target fail",
                    "prompt": {"turns": turns, "notes": notes},
                    "output": response["content"],
                    "triggers": None,
                    "score": row["response_score"],
                    "run_id": run_id,
                    "attempt_id": str(uuid.uuid5(uuid.NAMESPACE_URL, attempt)),
                    "attempt_seq": row["episode"],
                    # The number of the generation, of which there is one.
                    "attempt_idx": 0,
                    "generator": speakers["target"],
                    "probe": speakers["attacker"],
                    "detector": speakers["scorer"],
                    "generations_per_prompt": 1,
                }
            )
    return hits


def _garak_turn(role: str, text: str) -> dict[str, Any]:
    message: dict[str, Any] = {
        "text": text,
        "lang": None,
        "data_path": None,
        "data_type": None,
        "data_checksum": None,
        "notes": {},
    }
    return {"role": role, "content": message}
