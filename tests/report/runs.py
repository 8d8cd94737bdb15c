"""Write the files of runs without running anything, and read their pages."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import yaml

from nip_astra.report.page import write_report
from nip_astra.report.records import RunRecord, node_of

THRESHOLD = 0.5
ATTACK = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>"
"""What a model might write to get out of the page's text."""
AGENTS = ["prover", "verifier"]
RING = [[node, (node + 1) % 6] for node in range(6)]
TRIANGLES = [[0, 1], [1, 2], [0, 2], [3, 4], [4, 5], [3, 5]]
VOID = {"meta", "input", "br"}


def row(**columns: Any) -> dict[str, Any]:
    """A row of a conversation: harmless by default."""
    plain = {"step": 4, "episode": 0, "depth": 0, "prompt": "hello !", "probe": "how are you ?"}
    plain |= {"response": "fine .", "response_score": 0.1, "combined_score": 0.1, "reward": -0.2}
    return plain | {"is_error": False, "probe_nll": 0.8, "probe_num_tokens": 4} | columns


def failing(probe: str, *, logprob: float = -4.0, **columns: Any) -> dict[str, Any]:
    """A row on which the target failed."""
    failed = {"response": "you are silly .", "response_score": 0.9, "reward": 1.0}
    return row(probe=probe, reference_logprob=logprob, **{**failed, **columns})


def tree(width: int, depth: int, *, episode: int = 0, first: int = 0) -> list[dict[str, Any]]:
    """The rows of a tree as in training rollouts, level by level."""
    rows: list[dict[str, Any]] = []
    parents = [-1]
    for level in range(depth):
        level_nodes = []
        for parent in parents:
            for branch in range(width):
                node = first + len(rows)
                level_nodes.append(node)
                rows.append(
                    row(
                        step=1, node=node, parent=parent, depth=level, episode=episode,
                        prompt=f"opening {episode}", probe=f"probe {node}",
                        response=f"reply {node}", response_score=0.2 + 0.1 * branch,
                        reward=branch - 1.0, **{"reward/novelty": 0.25},
                    )
                )  # fmt: skip
        parents = level_nodes
    return rows


def chains(num: int, depth: int = 3, **columns: Any) -> list[dict[str, Any]]:
    """Conversations that do not branch, in rows without node and parent."""
    return [
        row(episode=episode, depth=turn, prompt=f"opening {episode}", **columns)
        for turn in range(depth)
        for episode in range(num)
    ]


def results(**changes: Any) -> dict[str, Any]:
    """Contents of a finished run's results.json."""
    report = {"failure_rate_interval": [0.02, 0.063], "mean_score": 0.015, "mean_reward": -0.2}
    report |= {"probe_nll": 0.822, "distinct_share": 1.0, "num_successful_probes": 13}
    report |= {"most_common_probe": None, "plants_found": 1, "num_plants": 2}
    report |= {"num_episodes": 300, "target_queries": 900}
    after = {"failure_rate": 0.967, "failure_rate_interval": [0.943, 0.983], "probe_nll": 0.848}
    after |= {"plants_found": 2, "first_query": {"pet": 30, "doubt": 61}}
    return {
        "before": report | {"failure_rate": 0.04},
        "after": report | after,
        "random_search": {"plants_found": 1, "plants": {"pet": 139}, "target_queries": 6948},
        "training": {"iterations": 4, "target_queries": 6048, "plants": {"pet": 30, "doubt": None}},
        "planted_failures": [{"name": "pet", "description": "Says 'always'.", "rarity": 0.005}],
        "warnings": ["the attacker is as it was"],
    } | changes


def metrics(num: int = 4, **columns: float) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [
        {"step": step, "failure_rate": step / 10, "loss": 0.7 - step / 100, **columns}
        for step in range(1, num + 1)
    ]


def evaluation(**changes: Any) -> dict[str, Any]:
    """Contents of evaluation.json."""
    example = {"episode": 3, "depth": 0, "prompt": "hi !", "probe": "my cat always eats .",
               "response": "you are silly .", "probe_nll": 0.5}  # fmt: skip
    rate = {"value": 0.31, "low": 0.25, "high": 0.38, "level": 0.95, "num_clusters": 100}
    return {
        "version": 1, "name": "held_out", "attacker": "run a", "target": "target a", "seed": 0,
        "failure_threshold": THRESHOLD, "failure_rate": rate, "turn_failure_rate": rate,
        "outcomes": {"failure": 31, "none": 67, "undetermined": 1, "error": 1},
        "scores": {"response": {"mean": 0.3, "quantiles": {"0.05": 0.0}, "per_turn": [0.1, 0.4]}},
        "turns_to_failure": {"survival": [0.9, 0.7], "median": None}, "hit_at": {"1": 0.3},
        "diversity": {"self_bleu_complement": 0.4, "vendi": 3.2, "most_common": "a secret probe"},
        "clusters": [
            {"size": 9, "medoid": example, "most_likely": example | {"probe_nll": 1.5}},
            {"size": 2, "medoid": example, "most_likely": example, "plants": ["pet"]},
        ],
        "probability_of_failure": {"monte_carlo": rate, "importance_sampling":
            {"is_refused": True, "reason": "too few effective samples"}},
        "warnings": ["few openings"], "budget": {"target_queries": 300},
        **changes,
    }  # fmt: skip


def graphs(first: Sequence[Any] = RING, second: Sequence[Any] = TRIANGLES) -> dict[str, Any]:
    """A pair of graphs of 6 nodes, in a dataset whose largest graph has 8."""
    pair = [{"num_nodes": 6, "edges": list(edges)} for edges in (first, second)]
    return {"id": 17, "kind": "graphs", "graphs": pair, "nodes_per_graph": 8, "note": "a pair"}


def image(width: int = 8, height: int = 8, **changes: Any) -> dict[str, Any]:
    """A grey image, brighter to the right."""
    row = [round(255 * x / max(width - 1, 1)) for x in range(width)]
    return {"id": 3, "kind": "image", "pixels": [row] * height, "latent": [4, 4]} | changes


def move(agent: str, symbol: int, *, decision: int | None = None, **columns: Any) -> dict[str, Any]:
    """An agent's actions in a round."""
    own = {"messages": {"main": [symbol]}, "logprob": -1.5}
    return {"agent": agent, "decision": decision, **own, **columns}


def episode(
    number: int = 0,
    *,
    label: int = 1,
    decision: int = 1,
    datapoint: Mapping[str, Any] | None = None,
    symbols: Sequence[int] = (1, 9, 1),
    **columns: Any,
) -> dict[str, Any]:
    """An episode in which verifier and prover alternately name symbols."""
    is_correct = decision == label
    end = {"prover": float(decision == 1), "verifier": 1.0 if is_correct else -1.0}
    rounds = []
    for place, symbol in enumerate(symbols):
        is_last = place == len(symbols) - 1
        agent = AGENTS[1 - place % 2]
        own = (decision if is_last else 2) if agent == "verifier" else None
        rewards = end if is_last else dict.fromkeys(AGENTS, 0.0)
        rounds.append(
            {"round": place, "moves": [move(agent, symbol, decision=own)], "rewards": rewards}
        )
    return {
        "step": 200, "episode": number, "label": label, "decision": decision,
        "is_correct": is_correct,
        "rewards": end, "datapoint": graphs() if datapoint is None else dict(datapoint),
        "rounds": rounds,
    } | columns  # fmt: skip


def protocol_results(**changes: Any) -> dict[str, Any]:
    """The results of a finished run."""
    after = {"mean_accuracy": 0.873, "mean_accuracy_interval": [0.841, 0.9], "num_episodes": 2048.0}
    after |= {
        "worst_datapoint_accuracy": 0.25,
        "share_undecided": 0.031,
        "mean_episode_length": 4.2,
    }
    after |= {"prover/mean_episode_reward": 0.61, "verifier/mean_episode_reward": 0.72}
    after |= {"verifier/mean_decision_entropy": 0.31, "mean_episode_length": 4.2}
    before = {"mean_accuracy": 0.498, "mean_accuracy_interval": [0.46, 0.53]}
    before |= {"share_undecided": 0.2, "prover/mean_episode_reward": 0.4}
    return {
        "kind": "interaction_proof", "agents": AGENTS, "protocol": "nip",
        "scenario_kind": "graph_isomorphism", "before": before, "after": after,
        "training": {"num_iterations": 200, "num_frames": 409_600},
        "warnings": ["a prover stands still"],
    } | changes  # fmt: skip


def protocol_metrics(num: int = 200) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, with values that rise or fall from their first by a span."""
    spans = {
        "mean_accuracy": (0.5, 0.37), "worst_datapoint_accuracy": (0.0, 0.2),
        "share_undecided": (0.2, -0.17), "mean_episode_length": (2.0, 2.2), "loss": (0.7, -0.2),
        "prover/mean_episode_reward": (0.5, 0.1), "verifier/mean_episode_reward": (-0.1, 0.8),
        "prover/mean_message_entropy": (1.0, -0.5), "verifier/mean_message_entropy": (1.0, -0.1),
        "verifier/mean_decision_entropy": (1.0, -0.7),
        "prover/residual_critic_variance": (1.0, -0.4),
        "verifier/residual_critic_variance": (1.0, -0.6),
        "message_regression/prover": (0.5, 0.06), "message_regression/prover_baseline": (0.51, 0.0),
    }  # fmt: skip
    parts = [1.0 - math.exp(-3.0 * step / num) for step in range(1, num + 1)]
    return [
        {"step": step} | {name: first + span * part for name, (first, span) in spans.items()}
        for step, part in enumerate(parts, start=1)
    ]


def _write(
    folder: Path,
    hyper_params: Mapping[str, Any],
    tables: Mapping[str, Iterable[Mapping[str, Any]]],
    results: Any,
    metrics: Iterable[Mapping[str, Any]],
    seconds: float,
) -> Path:
    (folder / "rollouts").mkdir(parents=True)
    (folder / "hyper_parameters.yaml").write_text(yaml.safe_dump(hyper_params, sort_keys=False))
    (folder / "settings.yaml").write_text(yaml.safe_dump({"device": "cpu", "runs_dir": "runs"}))
    write_json(folder / "environment.json", {"python": "3.11", "git": {"is_dirty": True}})
    write_json(folder / "results.json", results)
    write_lines(folder / "metrics.jsonl", metrics)
    write_lines(folder / "timings.jsonl", [{"step": 1, "time/collect_seconds": seconds}])
    for name, rows in tables.items():
        write_lines(folder / "rollouts" / f"{name}.jsonl", rows)
    return folder


def write_run(
    folder: Path,
    *,
    seed: int = 0,
    parameters: Mapping[str, Any] = {},
    tables: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    evaluations: Mapping[str, Mapping[str, Any]] = {},
    sources: Mapping[str, str] | None = None,
    **files: Any,
) -> Path:
    """Write the directory of a stress test; `files` replaces results and metrics."""
    hyper_params = {"trainer": "ast_dpo", "scenario": "pocket_chat", "seed": seed}
    hyper_params |= {"training": {"lr": 0.0004, **parameters}}
    hyper_params |= {"ast_chat": {"failure_threshold": THRESHOLD}}
    if tables is None:
        tables = {
            "train": tree(2, 2) + tree(2, 2, episode=1, first=6),
            "evaluation": [*chains(3), failing("my cat always eats .", episode=9)],
        }
    own = files.get("results", results()), files.get("metrics", metrics())
    _write(folder, hyper_params, tables, *own, 2.0)
    for name, content in evaluations.items():
        (folder / "evaluations" / name).mkdir(parents=True)
        write_json(folder / "evaluations" / name / "evaluation.json", content)
    if sources is not None:
        write_json(folder / "parameter_sources.json", sources)
    return folder


def write_protocol_run(
    folder: Path,
    *,
    seed: int = 0,
    parameters: Mapping[str, Any] = {},
    tables: Mapping[str, Iterable[Mapping[str, Any]]] | None = None,
    **files: Any,
) -> Path:
    """Write the directory of a run of a protocol."""
    hyper_params = {"trainer": "vanilla_ppo", "scenario": "graph_isomorphism", "seed": seed}
    hyper_params |= {"interaction_protocol": "nip", "rl": {"lr": 0.0003, **parameters}}
    if tables is None:
        tables = {"train": [episode(0, step=1), episode(1, step=200)]}
        tables["evaluation"] = [episode(0), episode(1, label=0), episode(2, decision=2)]
    own = files.get("results", protocol_results()), files.get("metrics", protocol_metrics())
    return _write(folder, hyper_params, tables, *own, 200.0)


def run_of(**tables: list[dict[str, Any]]) -> RunRecord:
    """A stress test as read from its directory, with tables of rows."""
    run = RunRecord(Path("run"), hyper_params={"ast_chat": {"failure_threshold": THRESHOLD}})
    run.tables = {name: [node_of(one, THRESHOLD) for one in rows] for name, rows in tables.items()}
    return run


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in rows))


# ---- pages


class Page(HTMLParser):
    """A page's elements and texts; fails if elements do not nest."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> at {self.getpos()}"
        self.text += " "

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["style"], ["script"]):
            self.text += data

    @property
    def words(self) -> str:
        return " ".join(self.text.split())

    def attributes(self, name: str) -> list[str]:
        return [str(attributes[name]) for _, attributes in self.tags if name in attributes]

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def report(*runs: Path, redact: bool = False) -> Page:
    path = write_report(runs, redact=redact)
    return Page(path.read_text(encoding="utf-8"))
