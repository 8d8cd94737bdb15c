"""Episodes of interaction protocols: rows, metrics and tables, and the family of networks.

A row has `datapoint_id`, `y`, `decision` ("accept", "reject" or None), `is_correct`, `num_rounds`,
`rewards` by agent, and columns of the family. An episode without a decision is wrong, since the
verifier had all its rounds; such episodes are also counted, with the accuracy of the others.

Shapes: E environments, T rounds, N episodes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from nip_astra.errors import NothingMeasuredError
from nip_astra.evaluation.comparison import ComparedRun, Metric, metric_of
from nip_astra.evaluation.families.base import (
    OF_ATTACKERS,
    Evaluation,
    EvaluationFamily,
    EvaluationRequest,
    OnPart,
    Subject,
    model_dir_of,
    register_evaluation_family,
    resolve_stored,
    trained_of,
)
from nip_astra.evaluation.storage import (
    EvaluationFolder,
    Row,
    weights_hash,
)
from nip_astra.evaluation.tables import figure_rows, plain_table
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.tracking.run_directory import (
    HYPER_PARAMETERS,
    MODEL_DIR,
    RunDirectory,
)
from nip_astra.utils.formatting import format_figure

EPISODE_ROWS = "episode_rows.jsonl"
"""One line per episode, without its messages."""
EPISODES = "episodes.jsonl"
"""A sample of whole episodes, for reports."""
DECISIONS = {0: "reject", 1: "accept"}
"""Names of a verifier's decisions; None if it has not decided."""


def bounds_of_undecided(rows: Sequence[Row]) -> dict[str, float]:
    """Return the number of undecided episodes and the accuracy of the others, if there are any."""
    decided = [row for row in rows if row["decision"] is not None]
    num_undecided = len(rows) - len(decided)
    if not num_undecided:
        return {}
    num_correct = sum(row["is_correct"] for row in decided)
    bounds = {
        "num_undecided": float(num_undecided),
        "accuracy_if_undecided_correct": (num_correct + num_undecided) / len(rows),
    }
    return bounds | ({"accuracy_of_decided": num_correct / len(decided)} if decided else {})


class EpisodeFamily(EvaluationFamily):
    """Base of the families whose rows are episodes of an interaction protocol."""

    kind = "interaction_proof"
    splits = ("train", "test")
    unread = OF_ATTACKERS | {"overrides", "batch_size"}

    def pair_key(self, unit: Row) -> Hashable:
        """Return the number of a row's datapoint, and its content, which datasets may not share."""
        content = json.dumps(unit.get("datapoint") or {}, sort_keys=True)
        return unit["datapoint_id"], unit["y"], unit.get("datapoint_hash") or content

    def tables(self, figures: Mapping[str, Any]) -> list[RenderableType]:
        """Return the figures of all episodes and by agent."""
        flat, agents = figures["figures"], figures["agents"]
        table = plain_table(f"{figures['run']}: {figures['name']}", "", "all", *agents)
        for label, cell in figure_rows(figures):
            table.add_row(Text(label), cell, *("" for _ in agents))
        names = [name for name in flat if not name.endswith("_interval") and "std_" not in name]
        for name in dict.fromkeys(one.partition("/")[2] for one in names if "/" in one):
            cells = [format_figure(flat, f"{agent}/{name}") for agent in agents]
            table.add_row(Text(name.replace("_", " ")), "", *cells)
        return [table]

    def compared_run(self, evaluation: Evaluation, label: str) -> ComparedRun:
        figures, rows = evaluation.figures, evaluation.rows
        metrics = {
            "accuracy": metric_of(lambda row: float(row["is_correct"]), is_binary=True),
            "share_undecided": metric_of(lambda row: float(row["decision"] is None)),
            "episode_length": metric_of(lambda row: float(row["num_rounds"]), "observed"),
            **{f"reward_of_{name}": _reward_of(name) for name in figures["agents"]},
        }
        # Runs should be equal in split, seed, and models before training.
        values = RunDirectory(evaluation.run).read_yaml(HYPER_PARAMETERS)
        sections = [values, *(one for one in values.values() if isinstance(one, Mapping))]
        models = {
            name: agent["model"]
            for section in sections
            for name, agent in (section.get("agents") or {}).items()
            if isinstance(agent, Mapping) and "model" in agent
        }
        seed = figures.get("seed")
        conditions = {
            "split": figures["split"],
            "seed": values["seed"] if seed is None else seed,
            "models": models,
        }
        return ComparedRun(
            label, rows, list(map(self.pair_key, rows)), metrics, figures, conditions
        )


def _reward_of(agent: str) -> Metric:
    return metric_of(lambda row: row["rewards"].get(agent), "observed")


@dataclass
class ProtocolSubject(Subject):
    """Agents of a run: those of its end, of a checkpoint, or untrained ones."""

    trainer: Any = None
    weights: Path | None = None
    environment: Any = None
    key: tuple[Any, ...] = ()
    num_batches: int = 0


@register_evaluation_family("protocol")
class Protocols(EpisodeFamily):
    """Runs whose agents are networks that play an interaction protocol."""

    name = "protocol"
    row_file = EPISODE_ROWS
    row_unit = "episode"

    def load(
        self, run: Path, request: EvaluationRequest, settings: ExperimentSettings
    ) -> Iterator[ProtocolSubject]:
        from nip_astra.run import prepare_experiment
        from nip_astra.trainers.protocol.agent_files import AGENTS_DIR, load_agent

        run, source, suffix = trained_of(run, request, model_dir_of)
        resolved = resolve_stored(run, request)
        if source is not None and source.name != MODEL_DIR:
            source = source / AGENTS_DIR
        trainer: Any = prepare_experiment(
            resolved, settings.model_copy(update={"progress": False})
        ).trainer
        if source is not None:
            for name in trainer.agents.names:
                load_agent(trainer.agents[name], source / f"{name}.safetensors")
        name = request.name or "-".join(filter(None, (request.split, suffix)))
        is_test = request.split == "test"
        environment = trainer.test_environment if is_test else trainer.train_environment
        seed, key = resolved.hyper_params.seed, ("test",)
        if request.seed is not None or not is_test:
            seed, key = seed if request.seed is None else request.seed, ("evaluation",)
            environment = environment.with_key(seed, "evaluation", request.split)
        num_batches = trainer.rl.num_test_iterations
        if request.num_episodes is not None:
            num_batches = math.ceil(request.num_episodes / environment.num_environments)
        yield ProtocolSubject(
            run,
            name,
            f"{RunDirectory(run).run_id}: {name}",
            trainer=trainer,
            weights=source,
            environment=environment,
            key=(seed, *key),
            num_batches=num_batches,
        )

    def units(self, subject: ProtocolSubject, request: EvaluationRequest) -> dict[str, Any]:
        return {
            "split": request.split,
            "seed": subject.key[0],
            "num_episodes": subject.num_batches * subject.environment.num_environments,
            "weights": None if subject.weights is None else weights_hash(subject.weights),
        }

    def num_units(self, subject: ProtocolSubject) -> int:
        return subject.num_batches

    def play(
        self,
        subject: ProtocolSubject,
        folder: EvaluationFolder,
        request: EvaluationRequest,
        on_part: OnPart,
    ) -> dict[str, Any]:
        from nip_astra.trainers.protocol.statistics import (
            NUM_TEST_EPISODES,
            PlayStatistics,
            episode_rows,
            outcome_rows,
        )

        trainer, step = subject.trainer, subject.trainer.rl.num_iterations
        statistics = PlayStatistics(trainer.agents.names)
        rows: list[Row] = []
        hashes: dict[int, str] = {}
        with trainer.testing():
            batches = trainer.test_batches(
                subject.environment, subject.key, range(subject.num_batches)
            )
            for number, batch in batches:
                statistics.add(batch)
                names, dataset = trainer.agents.names, subject.environment.dataset
                rows += outcome_rows(batch, names, dataset, hashes)
                if number == 0:
                    columns, shown = episode_rows(
                        batch,
                        trainer.scenario_instance,
                        num_episodes=NUM_TEST_EPISODES,
                        step=step,
                        seed=subject.key[0],
                    )
                    sample = (dict(zip(columns, row, strict=True)) for row in shown)
                    folder.write_rows(EPISODES, ({"step": step} | row for row in sample))
                on_part(1)
        rows = [
            {"episode": number, **row, "decision": DECISIONS.get(row["decision"])}
            for number, row in enumerate(rows)
        ]
        folder.write_rows(EPISODE_ROWS, rows)
        figures = statistics.report()
        if not figures.get("num_episodes"):
            raise NothingMeasuredError(f"no episode ended in the evaluation {folder.path.name}")
        return {
            "agents": list(trainer.agents.names),
            **self.units(subject, request),
            "figures": figures | bounds_of_undecided(rows),
        }
