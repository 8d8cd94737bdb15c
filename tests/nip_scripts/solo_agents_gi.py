"""Agents learn graph isomorphism alone, over a grid of hyper-parameters."""

import itertools

from nip_astra import (
    AgentsParameters,
    GraphIsomorphismAgentParameters,
    GraphIsomorphismParameters,
    HyperParameters,
    SoloAgentParameters,
    run_experiment,
)

param_grid = {
    "num_epochs": [100],
    "batch_size": [256],
    "learning_rate": [0.001],
    "body_lr_factor": [0.01],
    "seed": [8144, 820, 4173, 3992],
}


def construct_params(combo):
    body = {"actor": combo["body_lr_factor"]}
    return HyperParameters(
        scenario="graph_isomorphism",
        trainer="solo_agent",
        graph_isomorphism=GraphIsomorphismParameters(
            agents=AgentsParameters(
                [
                    (
                        name,
                        GraphIsomorphismAgentParameters(num_gnn_layers=count, body_lr_factor=body),
                    )
                    for name, count in (("prover", 5), ("verifier", 2))
                ]
            ),
        ),
        solo_agent=SoloAgentParameters(
            num_epochs=combo["num_epochs"],
            minibatch_size=combo["batch_size"],
            lr=combo["learning_rate"],
        ),
        seed=combo["seed"],
    )


def experiment_fn(combo, run_id, **settings):
    run_experiment(
        construct_params(combo),
        run_id=run_id,
        **settings,
    )


def run_all(**settings):
    values = itertools.product(*param_grid.values())
    for number, chosen in enumerate(values):
        combo = dict(zip(param_grid, chosen, strict=True))
        experiment_fn(combo, f"solo_agents_gi_a_{number}", **settings)


if __name__ == "__main__":
    run_all(device="auto", wandb="offline")
