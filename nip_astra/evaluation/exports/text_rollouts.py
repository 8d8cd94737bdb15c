"""Exports of rollouts in which chat models play an interaction protocol in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nip_astra.evaluation.exports.curves import write_events
from nip_astra.evaluation.exports.material import missing, write_text
from nip_astra.evaluation.exports.tables import SCHEMA_VERSION, csv_tables
from nip_astra.evaluation.rows import encode_rows
from nip_astra.protocols.protocol_base import CONTINUE
from nip_astra.samplers.text_arrays import active_turns, read_prompt
from nip_astra.utils.nested_array_dict import NestedArrayDict

DECISIONS = {0: "reject", 1: "accept"}
"""What a verifier's decision is called; none where it has not decided."""


class TextSampling(NamedTuple):
    """Rollouts that were played together.

    Attributes
    ----------
    split : str
        "train" or "test".
    iteration : int or None
        Of the run, the first being 0; None for an evaluation.
    """

    split: str
    iteration: int | None
    rollouts: NestedArrayDict


@dataclass(frozen=True)
class TextMaterial:
    """What there is to export of a run in words, whatever the format.

    Attributes
    ----------
    name : str
        The evaluation's, or that of the run.
    created : str
        ISO 8601 with time zone.
    samplings : sequence of TextSampling
        In the order in which they were played.
    agent_names, channel_names : sequence of str
        In the order of the rollouts' dimensions A and C.
    verifier_names : sequence of str
        Agents that decide.
    figures : Mapping
        What results or the evaluation say of the last test.
    metrics : Sequence[Mapping]
        Rows of `metrics.jsonl`.
    """

    run_id: str
    name: str
    created: str
    samplings: Sequence[TextSampling]
    agent_names: Sequence[str]
    channel_names: Sequence[str]
    verifier_names: Sequence[str]
    figures: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    hyper_params: Mapping[str, Any]
    environment: Mapping[str, Any]


def rollout_rows(material: TextMaterial) -> Iterator[dict[str, Any]]:
    """A row for each rollout, with its turns as they were said, and what each was asked."""
    for split, iteration, rollouts in material.samplings:
        turns: list[list[dict[str, Any]]] = [[] for _ in range(len(rollouts))]
        for n, r, a in active_turns(rollouts):
            turns[n].append(_turn(material, rollouts, (n, r, a)))
        returns_NA = rollouts["agents", "reward"].sum(axis=1)
        for n, said in enumerate(turns):
            y, decision = int(rollouts["y"][n]), int(rollouts["decision"][n])
            yield {
                "run": material.run_id,
                "split": split,
                "iteration": iteration,
                "rollout": n,
                "datapoint_id": int(rollouts["datapoint_id"][n]),
                "y": y,
                "decision": DECISIONS.get(decision),
                "is_right": decision == y,
                "num_rounds": int(rollouts["num_rounds"][n]),
                "datapoint": _datapoint(rollouts, n),
                "rewards": dict(zip(material.agent_names, returns_NA[n].tolist(), strict=True)),
                "turns": said,
            }


def write_text_csv(material: TextMaterial, folder: Path) -> list[Path]:
    """Write `rollouts.csv`, `turns.csv`, `figures.csv` and `metrics.csv`; see `csv_tables`.

    A turn has the number of its rollout, which is unique with split and iteration.
    """
    rollouts, turns = [], []
    for row in rollout_rows(material):
        place = {name: row[name] for name in ("split", "iteration", "rollout")}
        rollouts.append({name: value for name, value in row.items() if name != "turns"})
        for turn in row["turns"]:
            rest = {name: value for name, value in turn.items() if name != "prompt"}
            turns.append(place | rest)
    figures = dict(material.figures)
    return csv_tables(
        folder, {"rollouts": rollouts, "turns": turns}, figures, metrics=material.metrics
    )


def write_text_jsonl(material: TextMaterial, folder: Path) -> list[Path]:
    """Write `rollouts.jsonl`: a line about the run, one a rollout, and an end line.

    Texts are whole, and the end line proves the file to be.
    """
    rows = [{"v": SCHEMA_VERSION, "type": "rollout", **row} for row in rollout_rows(material)]
    head = {
        "v": SCHEMA_VERSION,
        "type": "run",
        "run": material.run_id,
        "name": material.name,
        "agents": list(material.agent_names),
        "channels": list(material.channel_names),
        "hyper_parameters": material.hyper_params,
        "environment": material.environment,
    }
    end = {"v": SCHEMA_VERSION, "type": "end", "num_rollouts": len(rows)}
    return [write_text(folder / "rollouts.jsonl", encode_rows([head, *rows, end]).decode())]


def write_text_parquet(material: TextMaterial, folder: Path) -> list[Path]:
    """Write `rollouts.parquet`, a row a rollout, which `datasets.load_dataset` reads.

    Raises
    ------
    MissingDependencyError
        When PyArrow is not installed.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise missing("a Parquet file", "pyarrow", "sweep") from error
    path = folder / "rollouts.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([*rollout_rows(material)]), path)
    return [path]


def write_text_tensorboard(material: TextMaterial, folder: Path) -> list[Path]:
    """Write the metrics of training, and the accuracy of the last test, as an event file."""
    accuracy = material.figures.get("mean_accuracy")
    last = {} if accuracy is None else {f"evaluation/{material.name}/accuracy": float(accuracy)}
    return write_events(folder / "tensorboard" / material.run_id, material.metrics, last)


def write_text_inspect(material: TextMaterial, folder: Path) -> list[Path]:
    """Write `<name>.eval`: a sample for each rollout, with whether its decision was right.

    Raises
    ------
    MissingDependencyError
        When inspect_ai is not installed.
    """
    try:
        from inspect_ai import log
    except ImportError as error:
        raise missing("an Inspect log", "inspect_ai", "inspect") from error
    rows = [*rollout_rows(material)]
    value = sum(row["is_right"] for row in rows) / max(len(rows), 1)
    metrics = {"accuracy": log.EvalMetric(name="accuracy", value=value)}
    packages = material.environment.get("packages") or {}
    written = log.EvalLog(
        status="success",
        eval=log.EvalSpec(
            created=material.created,
            task=f"{material.run_id}/{material.name}",
            dataset=log.EvalDataset(name=material.name, samples=len(rows)),
            model=f"nip_astra/{material.run_id}",
            config=log.EvalConfig(),
            packages={name: one for name, one in packages.items() if one is not None},
            metadata={"agents": list(material.agent_names)},
        ),
        results=log.EvalResults(
            total_samples=len(rows),
            completed_samples=len(rows),
            scores=[log.EvalScore(name="accuracy", scorer="accuracy", metrics=metrics)],
        ),
        samples=[_sample(row, place, material) for place, row in enumerate(rows, 1)],
    )
    path = folder / f"{material.name}.eval"
    log.write_eval_log(written, str(path), format="eval")
    return [path]


def _turn(
    material: TextMaterial, rollouts: NestedArrayDict, at: tuple[int, int, int]
) -> dict[str, Any]:
    parts, (_, r, a) = rollouts["agents"], at
    agent = material.agent_names[a]
    decides = agent in material.verifier_names
    said = zip(material.channel_names, parts["message"][at], strict=True)
    decision = int(parts["decision"][at]) if decides else CONTINUE
    return {
        "round": r,
        "agent": agent,
        "role": "verifier" if decides else "prover",
        # A list, since tables would give every turn every channel.
        "messages": [
            {"channel": channel, "text": text} for channel, text in said if text is not None
        ],
        "answer": parts["raw_message"][at],
        "decision": DECISIONS.get(decision),
        "reward": float(parts["reward"][at]),
        "num_retries": int(parts["num_retries"][at]),
        "is_cut": bool(parts["is_cut"][at]),
        "is_filled": bool(parts["is_filled"][at]),
        "prompt": [dict(message) for message in read_prompt(parts["prompt"][at])],
    }


def _datapoint(rollouts: NestedArrayDict, place: int) -> dict[str, Any]:
    columns = rollouts.get("datapoint")
    if columns is None:
        return {}
    return {str(name): _plain(array[place]) for name, array in columns.items()}


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _sample(row: Mapping[str, Any], place: int, material: TextMaterial) -> Any:
    from inspect_ai.log import EvalSample
    from inspect_ai.model import ChatMessageAssistant, ChatMessageUser, ModelOutput
    from inspect_ai.scorer import Score

    datapoint = "\n\n".join(f"{name}: {value}" for name, value in row["datapoint"].items())
    opening = ChatMessageUser(content=datapoint)
    messages: list[Any] = [opening]
    for turn in row["turns"]:
        kind = ChatMessageAssistant if turn["role"] == "verifier" else ChatMessageUser
        messages.append(kind(content=f"{turn['agent']}: {turn['answer']}"))
    decision = row["decision"] or "none"
    return EvalSample(
        id=place,
        epoch=1,
        input=[opening],
        target=DECISIONS[row["y"]],
        messages=messages,
        output=ModelOutput.from_content(f"nip_astra/{material.run_id}", decision),
        scores={"accuracy": Score(value=float(row["is_right"]), answer=decision)},
        metadata={
            **{name: row[name] for name in ("split", "iteration", "datapoint_id", "num_rounds")},
            "rewards": row["rewards"],
        },
    )
