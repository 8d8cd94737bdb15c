"""Time an update of vanilla_ppo with one process, and with two that divide losses or rows.

    python benchmarks/learning_processes.py --rounds 7

Losses are divided among forked processes, as with `--num-threads 2`; rows among the processes of a
team, as with torchrun. Rounds of the three are interleaved, with the same batch and initial
weights; forking and rendezvous are not timed. Prints medians, and median ratios over rounds.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from measuring import build_parser, interleaved, median_by_name, ratio, report_figures, seconds_of

from nip_astra.checkpoints.tensors import pack_state, unpack_state
from nip_astra.distributed.team import Team, team_on_this_machine
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import prepare_experiment
from nip_astra.utils.forked import call_at_once

NUM_PROCESSES = 2


def build_trainer(scenario: str, frames: int, minibatch: int) -> Any:
    """Build a trainer of the published protocol on generated graphs."""
    resolved = resolve_experiment(
        trainer="vanilla_ppo",
        scenario=scenario,
        overrides=[f"rl.frames_per_batch={frames}", f"rl.minibatch_size={minibatch}"],
    )
    return prepare_experiment(resolved, ExperimentSettings(progress=False)).trainer


def seconds_of_update(trainer: Any, batch: Any, team: Team, num_processes: int) -> float:
    """Time an update, and restore weights and optimizers."""
    weights = {name: value.clone() for name, value in trainer.agents.state_dict().items()}
    packed = pack_state({name: part.save() for name, part in trainer.kept_parts().items()})
    trainer.learner.team = team
    with trainer.learner.processes(num_processes):
        seconds = seconds_of(lambda: trainer.learner.learn(batch, 0))
    trainer.learner.team = Team()
    trainer.agents.load_state_dict(weights)
    saved = unpack_state(packed)
    for name, part in trainer.kept_parts().items():
        part.load(saved[name])
    return seconds


def seconds_by_rows(trainer: Any, batch: Any) -> float:
    """Time an update of a team of forked processes: the slowest process counts."""
    with TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")

        def update(rank: int) -> float:
            with team_on_this_machine(store, rank, NUM_PROCESSES) as team:
                # Start all processes together.
                team.all_gather(0)
                return seconds_of_update(trainer, batch, team, 1)

        return max(call_at_once([partial(update, rank) for rank in range(NUM_PROCESSES)]))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the figures."""
    scenario = "graph_isomorphism_small"
    parser = build_parser(__doc__, rounds=7, scenario=scenario, frames=1536, minibatch=512)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    trainer = build_trainer(options.scenario, options.frames, options.minibatch)
    trainer.agents.train()
    batch = trainer.collect()
    variants = {
        "one": lambda: seconds_of_update(trainer, batch, Team(), 1),
        "losses": lambda: seconds_of_update(trainer, batch, Team(), NUM_PROCESSES),
        "rows": lambda: seconds_by_rows(trainer, batch),
    }
    # The first round is dropped: it allocates memory.
    measured = interleaved(variants, options.rounds + 1)
    seconds = {name: rounds[1:] for name, rounds in measured.items()}
    rounds = [dict(zip(seconds, row, strict=True)) for row in zip(*seconds.values(), strict=True)]
    figures: dict[str, Any] = {
        "rounds": rounds,
        "load": os.getloadavg(),
        "medians": median_by_name(rounds),
    }
    for name, baseline in (("losses", "one"), ("rows", "one"), ("rows", "losses")):
        figures[f"{name}/{baseline}"] = ratio(seconds[name], seconds[baseline])
    report_figures(figures, options.out)


if __name__ == "__main__":
    main()
