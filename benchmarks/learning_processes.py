"""Time an update of vanilla_ppo by one process, by forked ones, and by torch.distributed.

    torchrun --standalone --nproc-per-node 2 benchmarks/learning_processes.py --rounds 7

The three take turns in the same processes, on the same batch and from the same weights; while one
or forked processes learn, the others wait. Prints medians, and medians of the rounds' ratios.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from measuring import median_by_name, options_of, ratio, seconds_of, tell

from nip_astra.checkpoints.tensors import pack_state, unpack_state
from nip_astra.distributed.team import Team, open_team
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import prepare_experiment
from nip_astra.trainers.protocol.processes import collect_together, prepare_together

WAYS = ("one", "forked", "gloo")


def trainer_of(scenario: str, frames: int, minibatch: int, team: Team) -> Any:
    """A trainer of the published protocol on generated graphs."""
    resolved = resolve_experiment(
        trainer="vanilla_ppo",
        scenario=scenario,
        overrides=[f"rl.frames_per_batch={frames}", f"rl.minibatch_size={minibatch}"],
    )
    settings = ExperimentSettings(progress=False, team=team)
    return prepare_experiment(resolved, settings).trainer


def seconds_of_update(trainer: Any, batch: Any, team: Team, num_processes: int | None) -> float:
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


def measure(trainer: Any, team: Team, num_rounds: int) -> list[dict[str, float]]:
    """Seconds of an update in each round, by way."""
    batch = collect_together(trainer)
    rounds = []
    for _ in range(num_rounds + 1):
        found: dict[str, float] = {}
        for way in WAYS:
            team.of_all(0)
            if way == "gloo":
                found[way] = seconds_of_update(trainer, batch, team, None)
            elif team.is_leader:
                count = team.size if way == "forked" else None
                found[way] = seconds_of_update(trainer, batch, Team(), count)
        rounds.append(found)
    # The first is not measured: memory is yet to be had.
    return rounds[1:]


def main() -> None:
    """Measure, and print."""
    scenario = "graph_isomorphism_small"
    parser = options_of(__doc__, rounds=7, scenario=scenario, frames=1536, minibatch=512)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with open_team(torch.device("cpu")) as team:
        trainer = trainer_of(options.scenario, options.frames, options.minibatch, team)
        prepare_together(trainer, lambda: None)
        trainer.agents.train()
        rounds = measure(trainer, team, options.rounds)
        if not team.is_leader:
            return
    found = {"rounds": rounds, "load": os.getloadavg(), "medians": median_by_name(rounds)}
    for one, other in (("forked", "one"), ("gloo", "one"), ("gloo", "forked")):
        of_one, of_other = ([seconds[way] for seconds in rounds] for way in (one, other))
        found[f"{one}/{other}"] = ratio(of_one, of_other)
    tell(found, options.out)


if __name__ == "__main__":
    main()
