"""How fast conversations are played and learned from, and how much work is done twice.

    python benchmarks/rollouts.py --scenario pocket_chat --iterations 5 --out rollouts.json

Plays the training loop of `ast_dpo` and prints iterations and tokens a second, positions forwarded
per unique token of each model, and peak memory; writes the same as JSON. The first iteration warms
up and is not measured.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor

from nip_astra.language_models.base import Generation, LanguageModel
from nip_astra.resolution import resolve_experiment
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.run import prepare_experiment
from nip_astra.samplers.trees import TreeSampler
from nip_astra.scenario_base.agents import ConversationAgent
from nip_astra.tracking.environment import describe_environment
from nip_astra.tracking.tracker import Tracker
from nip_astra.trainers.ast_base import AstTrainer

ROLES = ("attacker", "target", "reference")


def count_unique_tokens(sequences: Iterable[Sequence[int]]) -> int:
    """Count the tokens that a model must read at least once to read all sequences.

    A token is the same as another where all tokens before it are the same too, so this is the
    number of nodes of the trie of the sequences, its root not counted.
    """
    root: dict[int, Any] = {}
    num_unique = 0
    for sequence in sequences:
        node = root
        for token in sequence:
            if token not in node:
                node[token] = {}
                num_unique += 1
            node = node[token]
    return num_unique


@dataclass
class RecordingAgent(ConversationAgent):
    """An agent that keeps what its model had to read: contexts, and all but the last token said.

    The last token of a turn is predicted and, unless the conversation goes on, read by nobody.
    """

    read: list[list[int]] = field(default_factory=list)

    def speak(
        self, contexts: Sequence[Sequence[int]], rows_per_context: int, uniforms_BT: Tensor
    ) -> Generation:
        said = super().speak(contexts, rows_per_context, uniforms_BT)
        lengths = said.mask_BT.sum(dim=1).tolist()
        for row, (ids, length) in enumerate(zip(said.ids_BT.tolist(), lengths, strict=True)):
            self.read.append([*contexts[row // rows_per_context], *ids[: max(length - 1, 0)]])
        return said


class Rollout(NamedTuple):
    """What one iteration's sampling took; `forwarded` and `unique` by role."""

    forwarded: dict[str, int]
    unique: dict[str, int]
    num_nodes: int


class MeasuringSampler:
    """Stands in for the sampler of a harness and measures each rollout."""

    def __init__(self, sampler: TreeSampler) -> None:
        self._agents = {role: _recording(getattr(sampler, role)) for role in ("attacker", "target")}
        self._sampler = TreeSampler(
            self._agents["attacker"],
            self._agents["target"],
            sampler.reference,
            sampler.scorer,
            sampler.reward,
        )
        self._models: dict[str, LanguageModel] = {
            role: getattr(sampler, role).language_model for role in ROLES
        }
        self.rollouts: list[Rollout] = []
        self._recorded: list[dict[str, list[list[int]]]] = []

    def sample(self, prompts: Sequence[str], **options: Any) -> RolloutTree:
        """Sample as the sampler that it stands for."""
        for agent in self._agents.values():
            agent.read = []
        before = {role: model.token_count.forwarded for role, model in self._models.items()}
        tree = self._sampler.sample(prompts, **options)
        forwarded = {
            role: model.token_count.forwarded - before[role] for role, model in self._models.items()
        }
        read = {role: agent.read for role, agent in self._agents.items()}
        # The reference rates the probes: it must read what the attacker had to read.
        read["reference"] = read["attacker"]
        self._recorded.append(read)
        self.rollouts.append(Rollout(forwarded, {}, tree.num_nodes))
        return tree

    def count(self) -> None:
        """Count unique tokens; apart from sampling, so that counting is not timed."""
        for rollout, read in zip(self.rollouts, self._recorded, strict=True):
            rollout.unique.update({role: count_unique_tokens(read[role]) for role in ROLES})


class MetricsTracker(Tracker):
    """Keeps metrics in memory."""

    def __init__(self) -> None:
        self.iterations: list[dict[str, float]] = []

    def log_metrics(self, values: Mapping[str, float], *, step: int) -> None:
        self.iterations.append(dict(values))


def measure(scenario: str, num_iterations: int, seed: int, device: str) -> dict[str, Any]:
    """Train for `num_iterations` after one that warms up, and give the figures."""
    tracker = MetricsTracker()
    overrides = [
        f"training.training_steps={num_iterations + 1}",
        "training.eval_period=0",
        "ast_chat.evaluation.num_episodes=1",
        "ast_chat.evaluation.use_random_search=false",
    ]
    resolved = resolve_experiment(
        trainer="ast_dpo", scenario=scenario, overrides=overrides, seed=seed
    )
    prepared = prepare_experiment(resolved, tracker=tracker, device=device)
    trainer = prepared.trainer
    assert isinstance(trainer, AstTrainer)
    sampler = MeasuringSampler(trainer.sampler)
    trainer.harness.sampler = sampler  # type: ignore[assignment]  # it samples, which is all
    trainer.train()
    peak = _peak_memory_bytes()
    sampler.count()
    return {
        "scenario": scenario,
        "seed": seed,
        "device": device,
        "num_iterations": num_iterations,
        "num_parameters": prepared.scenario_instance.num_parameters,
        **_figures(tracker.iterations[1:], sampler.rollouts[1:]),
        "peak_memory_bytes": peak,
    }


def _figures(
    iterations: Sequence[Mapping[str, float]], rollouts: Sequence[Rollout]
) -> dict[str, Any]:
    collect = sum(values["time/collect_seconds"] for values in iterations)
    update = sum(values["time/update_seconds"] for values in iterations)
    generated = sum(values["tokens/generated"] for values in iterations)
    forwarded = {role: sum(rollout.forwarded[role] for rollout in rollouts) for role in ROLES}
    unique = {role: sum(rollout.unique[role] for rollout in rollouts) for role in ROLES}
    return {
        "iterations_per_second": len(iterations) / (collect + update),
        "collect_seconds_per_iteration": collect / len(iterations),
        "update_seconds_per_iteration": update / len(iterations),
        "tokens_per_second": generated / (collect + update),
        "tokens_per_second_while_collecting": generated / collect,
        "target_queries_per_second": sum(r.num_nodes for r in rollouts) / (collect + update),
        "generated_tokens": generated,
        "forwarded_tokens": forwarded,
        "unique_tokens": unique,
        "forwarded_per_unique_token": {role: forwarded[role] / unique[role] for role in ROLES},
    }


def _recording(agent: ConversationAgent) -> RecordingAgent:
    return RecordingAgent(
        agent.role, agent.language_model, agent.conversation_format, agent.sampling
    )


def _peak_memory_bytes() -> int:
    # Kibibytes on Linux, bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def print_figures(figures: Mapping[str, Any], console: Console) -> None:
    """Print the figures as a table."""
    title = (
        f"{figures['scenario']}, {figures['num_iterations']} iterations on {figures['device']}, "
        f"largest model {figures['num_parameters']:,} weights"
    )
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    for label, value in (
        ("iterations per second", f"{figures['iterations_per_second']:.3f}"),
        ("  seconds collecting", f"{figures['collect_seconds_per_iteration']:.2f}"),
        ("  seconds updating", f"{figures['update_seconds_per_iteration']:.2f}"),
        ("tokens per second", f"{figures['tokens_per_second']:,.0f}"),
        ("  while collecting", f"{figures['tokens_per_second_while_collecting']:,.0f}"),
        ("target queries per second", f"{figures['target_queries_per_second']:,.0f}"),
        *(
            (f"forwarded per unique token, {role}", f"{ratio:.2f}")
            for role, ratio in figures["forwarded_per_unique_token"].items()
        ),
        ("peak memory, MiB", f"{figures['peak_memory_bytes'] / 2**20:,.0f}"),
    ):
        table.add_row(label, value)
    console.print(title, table, sep="\n")


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--scenario", default="pocket_chat")
    parser.add_argument("--iterations", type=int, default=5, help="measured ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda", "auto"])
    parser.add_argument("--out", type=Path, default=Path("rollouts.json"), help="JSON to write")
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    figures = measure(options.scenario, options.iterations, options.seed, options.device)
    print_figures(figures, Console())
    environment = describe_environment()
    options.out.write_text(json.dumps(figures | {"environment": environment}, indent=2) + "\n")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
