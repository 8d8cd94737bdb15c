"""Prover and verifier learn graph isomorphism by PPO, over a grid of hyper-parameters."""

import itertools

from nip_astra import (
    AgentsParameters,
    AlternatingPeriodicUpdateSchedule,
    CommonPpoParameters,
    CommonProtocolParameters,
    ConstantUpdateSchedule,
    ContiguousPeriodicUpdateSchedule,
    DebateProtocolParameters,
    GraphIsomorphismAgentParameters,
    GraphIsomorphismParameters,
    GraphPairParameters,
    HyperParameters,
    LrFactors,
    NipProtocolParameters,
    PreparedExperiment,
    RandomAgentParameters,
    RlTrainerParameters,
    prepare_experiment,
    run_experiment,
)

param_grid = {
    "trainer": ["vanilla_ppo"],
    "interaction_protocol": ["nip"],
    "num_iterations": [5000],
    "num_test_iterations": [10],
    "frames_per_batch": [2048],
    "minibatch_size": [256],
    "random_prover": [False],
    # (iterations of the verifier, iterations of the prover or of each of two), or None
    "update_spec": [None],
    "pretrain_agents": [False],
    "max_train_size": [10_000],
    "seed": [8144, 820, 4173, 3992],
}


def schedules(spec):
    if spec is None:
        return [ConstantUpdateSchedule()] * 3
    period = sum(spec)
    if len(spec) == 2:
        return [
            AlternatingPeriodicUpdateSchedule(period, spec[0], first_agent=True),
            AlternatingPeriodicUpdateSchedule(period, spec[0], first_agent=False),
        ]
    stops = [sum(spec[: number + 1]) for number in range(3)]
    return [
        ContiguousPeriodicUpdateSchedule(period, start, stop)
        for start, stop in zip([0, *stops[:-1]], stops, strict=True)
    ]


def agent(num_gnn_layers, schedule):
    return GraphIsomorphismAgentParameters(
        num_gnn_layers=num_gnn_layers,
        activation_function="tanh",
        agent_lr_factor={"actor": 1.0, "critic": 1.0},
        body_lr_factor=LrFactors(actor=1.0, critic=1.0),
        gnn_lr_factor={"actor": 1.0, "critic": 1.0},
        num_transformer_layers=1,
        num_heads=4,
        num_value_layers=2,
        d_value=16,
        use_dual_gnn=False,
        include_round_in_decider=True,
        use_batch_norm=False,
        use_orthogonal_initialisation=True,
        update_schedule=schedule,
    )


def rounds(protocol):
    cls = {"nip": NipProtocolParameters, "debate": DebateProtocolParameters}[protocol]
    return cls(min_message_rounds=2, max_message_rounds=8)


def construct_params(combo):
    of_verifier, *of_provers = schedules(combo["update_spec"])
    agents = {"verifier": agent(2, of_verifier)}
    prover = RandomAgentParameters() if combo["random_prover"] else agent(5, of_provers[0])
    if combo["interaction_protocol"] == "nip":
        agents["prover"] = prover
    else:
        agents["prover0"] = prover
        agents["prover1"] = prover.model_copy(update={"update_schedule": of_provers[-1]})
    return HyperParameters(
        scenario="graph_isomorphism",
        trainer=combo["trainer"],
        graph_isomorphism=GraphIsomorphismParameters(
            dataset=GraphPairParameters(num_train=combo["max_train_size"]),
            agents=AgentsParameters(**agents),
            d_representation=16,
            include_linear_message_space=False,
            message_size=1,
        ),
        rl=RlTrainerParameters(
            frames_per_batch=combo["frames_per_batch"],
            num_iterations=combo["num_iterations"],
            num_test_iterations=combo["num_test_iterations"],
            num_epochs=10,
            minibatch_size=combo["minibatch_size"],
            lr=0.0003,
            anneal_lr=False,
            max_grad_norm=0.5,
            normalize_observations=True,
            use_shared_body=False,
            gamma=0.95,
            lmbda=0.95,
            loss_critic_type="smooth_l1",
            clip_value=None,
            pretrain_agents=combo["pretrain_agents"],
        ),
        ppo=CommonPpoParameters(
            loss_type="clip",
            clip_low=0.2,
            clip_high=0.2,
            critic_coef=1.0,
            entropy_weight=0.001,
            normalize_advantage=True,
        ),
        interaction_protocol=combo["interaction_protocol"],
        protocol_common=CommonProtocolParameters(
            shared_reward=False,
            verifier_terminated_penalty=-1.0,
            verifier_no_guess_reward=0.05,
            verifier_first=True,
        ),
        **{combo["interaction_protocol"]: rounds(combo["interaction_protocol"])},
        seed=combo["seed"],
    )


def experiment_fn(combo, run_id, **settings):
    run_experiment(
        construct_params(combo),
        run_id=run_id,
        **settings,
    )


def run_preparer_fn(combo) -> PreparedExperiment:
    return prepare_experiment(construct_params(combo))


def run_all(**settings):
    values = itertools.product(*param_grid.values())
    for number, chosen in enumerate(values):
        combo = dict(zip(param_grid, chosen, strict=True))
        experiment_fn(combo, f"ppo_gi_a_{number}", **settings)


if __name__ == "__main__":
    run_all(device="auto", wandb="offline")
