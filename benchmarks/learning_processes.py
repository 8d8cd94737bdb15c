"""Time an update of vanilla_ppo by one process, and by two that divide losses or rows.

    python benchmarks/learning_processes.py --rounds 7

Losses are divided among forked processes, as `--num-threads 2` has it; rows among processes of a
team, as torchrun starts them. The three take turns, on the same batch and from the same weights;
forking and meeting are not counted. Prints medians, and medians of the rounds' ratios.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from measuring import in_turns, median_by_name, options_of, ratio, seconds_of, tell

from nip_astra.checkpoints.tensors import pack_state, unpack_state
from nip_astra.distributed.team import Team, team_on_this_machine
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import prepare_experiment
from nip_astra.utils.forked import call_at_once

NUM_PROCESSES = 2


def trainer_of(scenario: str, frames: int, minibatch: int) -> Any:
    """A trainer of the published protocol on generated graphs."""
    resolved = resolve_experiment(
        trainer="vanilla_ppo",
        scenario=scenario,
        overrides=[f"rl.frames_per_batch={frames}", f"rl.minibatch_size={minibatch}"],
    )
    return prepare_experiment(resolved, ExperimentSettings(progress=False)).trainer


def seconds_of_update(trainer: Any, batch: Any, team: Team, num_processes: int) -> float:
    """How long an update takes; weights and optimizers are as before afterwards."""
    weights = {name: value.clone() for name, value in trainer.agents.state_dict().items()}
    packed = pack_state({name: part.save() for name, part in trainer.kept_parts().items()})
    trainer.learner.team = team
    with trainer.learner.processes(num_processes):
        spent = seconds_of(lambda: trainer.learner.learn(batch, 0))
    trainer.learner.team = Team()
    trainer.agents.load_state_dict(weights)
    kept = unpack_state(packed)
    for name, part in trainer.kept_parts().items():
        part.load(kept[name])
    return spent


def seconds_by_rows(trainer: Any, batch: Any) -> float:
    """How long an update takes a team, of which all but this process are forked for it."""
    with TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")

        def take_part(rank: int) -> float:
            with team_on_this_machine(store, rank, NUM_PROCESSES) as team:
                # All begin together.
                team.all_gather(0)
                return seconds_of_update(trainer, batch, team, 1)

        return max(call_at_once([partial(take_part, rank) for rank in range(NUM_PROCESSES)]))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print."""
    scenario = "graph_isomorphism_small"
    parser = options_of(__doc__, rounds=7, scenario=scenario, frames=1536, minibatch=512)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    trainer = trainer_of(options.scenario, options.frames, options.minibatch)
    trainer.agents.train()
    batch = trainer.collect()
    ways = {
        "one": lambda: seconds_of_update(trainer, batch, Team(), 1),
        "losses": lambda: seconds_of_update(trainer, batch, Team(), NUM_PROCESSES),
        "rows": lambda: seconds_by_rows(trainer, batch),
    }
    # The first round is not counted: memory is yet to be had.
    seconds = {way: rounds[1:] for way, rounds in in_turns(ways, options.rounds + 1).items()}
    rounds = [dict(zip(seconds, one, strict=True)) for one in zip(*seconds.values(), strict=True)]
    found = {"rounds": rounds, "load": os.getloadavg(), "medians": median_by_name(rounds)}
    for one, other in (("losses", "one"), ("rows", "one"), ("rows", "losses")):
        found[f"{one}/{other}"] = ratio(seconds[one], seconds[other])
    tell(found, options.out)


if __name__ == "__main__":
    main()
