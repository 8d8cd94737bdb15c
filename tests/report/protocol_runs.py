"""Make the files of a run in which agents played an interaction protocol, without any playing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.report.runs import write_json, write_lines

AGENTS = ["prover", "verifier"]
RING = [[node, (node + 1) % 6] for node in range(6)]
TRIANGLES = [[0, 1], [1, 2], [0, 2], [3, 4], [4, 5], [3, 5]]


def graphs(first: Sequence[Any] = RING, second: Sequence[Any] = TRIANGLES) -> dict[str, Any]:
    """A pair of graphs of 6 nodes, in a dataset whose largest graph has 8."""
    pair = [{"num_nodes": 6, "edges": list(edges)} for edges in (first, second)]
    return {"id": 17, "kind": "graphs", "graphs": pair, "nodes_per_graph": 8, "note": "a pair"}


def image(width: int = 8, height: int = 8, **changes: Any) -> dict[str, Any]:
    """A grey image, brighter to the right."""
    row = [round(255 * x / max(width - 1, 1)) for x in range(width)]
    return {"id": 3, "kind": "image", "pixels": [row] * height, "latent": [4, 4]} | changes


def move(agent: str, symbol: int, *, decision: int | None = None, **columns: Any) -> dict[str, Any]:
    """What an agent did in a round."""
    said = {"messages": {"main": [symbol]}, "logprob": -1.5}
    return {"agent": agent, "decision": decision, **said, **columns}


def episode(
    number: int = 0,
    *,
    label: int = 1,
    decision: int = 1,
    datapoint: Mapping[str, Any] | None = None,
    symbols: Sequence[int] = (1, 9, 1),
    **columns: Any,
) -> dict[str, Any]:
    """An episode in which verifier and prover name symbols in turn."""
    is_right = decision == label
    rounds = []
    for place, symbol in enumerate(symbols):
        is_last = place == len(symbols) - 1
        agent = AGENTS[1 - place % 2]
        said = (decision if is_last else 2) if agent == "verifier" else None
        end = {"prover": float(decision == 1), "verifier": 1.0 if is_right else -1.0}
        rewards = end if is_last else {"prover": 0.0, "verifier": 0.0}
        rounds.append(
            {"round": place, "moves": [move(agent, symbol, decision=said)], "rewards": rewards}
        )
    return {
        "step": 200, "episode": number, "label": label, "decision": decision, "is_right": is_right,
        "rewards": {"prover": float(decision == 1), "verifier": 1.0 if is_right else -1.0},
        "datapoint": graphs() if datapoint is None else dict(datapoint), "rounds": rounds,
    } | columns  # fmt: skip


def protocol_results(**changes: Any) -> dict[str, Any]:
    """The results of a finished run."""
    after = {
        "mean_accuracy": 0.873, "mean_accuracy_interval": [0.841, 0.9],
        "worst_datapoint_accuracy": 0.25, "share_undecided": 0.031,
        "mean_episode_length": 4.2, "num_episodes": 2048.0,
        "prover/mean_episode_reward": 0.61, "verifier/mean_episode_reward": 0.72,
        "verifier/mean_decision_entropy": 0.31,
    }  # fmt: skip
    before = {"mean_accuracy": 0.498, "mean_accuracy_interval": [0.46, 0.53]}
    before |= {"share_undecided": 0.2, "prover/mean_episode_reward": 0.4}
    return {
        "kind": "interaction_proof", "agents": AGENTS, "protocol": "nip",
        "scenario_kind": "graph_isomorphism", "before": before, "after": after,
        "training": {"num_iterations": 200, "num_frames": 409_600},
        "warnings": ["a prover stands still"],
    } | changes  # fmt: skip


def protocol_metrics(num: int = 200) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, rising as learning does."""
    rows = []
    for step in range(1, num + 1):
        part = 1.0 - math.exp(-3.0 * step / num) + 0.03 * math.sin(1.7 * step)
        rows.append(
            {
                "step": step, "mean_accuracy": 0.5 + 0.37 * min(max(part, 0.0), 1.0),
                "worst_datapoint_accuracy": 0.2 * part, "share_undecided": 0.2 - 0.17 * part,
                "mean_episode_length": 2.0 + 2.2 * part, "loss": 0.7 - 0.2 * part,
                "prover/mean_episode_reward": 0.5 + 0.1 * part,
                "verifier/mean_episode_reward": -0.1 + 0.8 * part,
                "prover/mean_message_entropy": 1.0 - 0.5 * part,
                "verifier/mean_message_entropy": 1.0 - 0.1 * part,
                "verifier/mean_decision_entropy": 1.0 - 0.7 * part,
                "prover/residual_critic_variance": 1.0 - 0.4 * part,
                "verifier/residual_critic_variance": 1.0 - 0.6 * part,
                "message_regression/prover": 0.5 + 0.06 * part,
                "message_regression/prover_baseline": 0.51,
            }
        )  # fmt: skip
    return rows


def write_protocol_run(
    folder: Path,
    *,
    seed: int = 0,
    parameters: Mapping[str, Any] = {},
    tables: Mapping[str, Iterable[Mapping[str, Any]]] | None = None,
    results: Mapping[str, Any] | None = None,
    metrics: Iterable[Mapping[str, Any]] | None = None,
) -> Path:
    """Write a run directory."""
    hyper_params = {"trainer": "vanilla_ppo", "scenario": "graph_isomorphism", "seed": seed}
    hyper_params |= {"interaction_protocol": "nip", "rl": {"lr": 0.0003, **parameters}}
    if tables is None:
        wrong = {"label": 0, "decision": 1}
        tables = {
            "train": [episode(0, step=1), episode(1, step=200)],
            "evaluation": [episode(0), episode(1, **wrong), episode(2, decision=2)],
        }
    (folder / "rollouts").mkdir(parents=True)
    (folder / "hyper_parameters.yaml").write_text(yaml.safe_dump(hyper_params, sort_keys=False))
    (folder / "settings.yaml").write_text(yaml.safe_dump({"device": "cpu", "runs_dir": "runs"}))
    write_json(folder / "environment.json", {"python": "3.11"})
    write_json(folder / "results.json", protocol_results() if results is None else results)
    write_lines(folder / "metrics.jsonl", protocol_metrics() if metrics is None else metrics)
    write_lines(folder / "timings.jsonl", [{"step": 1, "time/collect_seconds": 200.0}])
    for name, rows in tables.items():
        write_lines(folder / "rollouts" / f"{name}.jsonl", rows)
    return folder
