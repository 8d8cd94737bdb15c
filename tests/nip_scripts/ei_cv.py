"""Provers and a verifier learn code validation by expert iteration, over a grid."""

import itertools

from nip_astra import (
    AgentsParameters,
    CodeValidationAgentParameters,
    CodeValidationParameters,
    CommonProtocolParameters,
    DebateProtocolParameters,
    HyperParameters,
    InteractionProtocolType,
    NipProtocolParameters,
    PureTextEiParameters,
    ScenarioType,
    TextRlParameters,
    TrainerType,
    prepare_experiment,
    run_experiment,
)

param_grid = {
    "interaction_protocol": ["nip"],
    "levels": [[1, 2]],
    "num_iterations": [8],
    "rollouts_per_iteration": [200],
    "verifier_model": ["gpt-4o-mini-2024-07-18"],
    "verifier_temperature": [1.0],
    "verifier_top_p": [1.0],
    "prover_model": ["gpt-4o-2024-08-06"],
    "prover_temperature": [1.0],
    "prover_top_p": [1.0],
    "freeze_prover": [False],
    "fine_tune_from_scratch": [True],
    "max_response_words": [150],
    "num_invalid_generation_retries": [20],
    "rollout_selection_method": ["threshold"],
    "reward_threshold": [0.9],
    "guess_replacement": [0.2],
    "guess_annealing": ["linear"],
    "guess_annealing_rate": [0.1],
    "test_scheme": ["first_and_last"],
    "shared_reward": [False],
    "randomize_prover_stance": [False],
    "min_message_rounds": [2],
    "max_message_rounds": [8],
    "verifier_first": [True],
    "debate_sequential": [False],
    "use_dummy_api": [True],
    "seed": [6198],
}

PROVERS = {
    "nip": ("prover",),
    "adp": ("prover",),
    "debate": ("prover0", "prover1"),
    "merlin_arthur": ("prover0", "prover1"),
}


def model_of(combo, role):
    if combo["use_dummy_api"]:
        answers = ["Decision: accept", "Decision: reject", "What does the loop do?"]
        return {"_type": "scripted", "model": combo[f"{role}_model"], "answers": answers}
    return {
        "_type": "openai",
        "model": combo[f"{role}_model"],
        "api_key_variable": "OPENAI_API_KEY",
    }


def agent_params(combo, role):
    return CodeValidationAgentParameters(
        model=model_of(combo, role),
        temperature=combo[f"{role}_temperature"],
        top_p=combo[f"{role}_top_p"],
        fine_tune_from_scratch=combo["fine_tune_from_scratch"] and not combo["use_dummy_api"],
        freeze_agent=combo["use_dummy_api"] or (role == "prover" and combo["freeze_prover"]),
        max_response_words=combo["max_response_words"],
        num_invalid_generation_retries=combo["num_invalid_generation_retries"],
        shared_model_group=f"{role}s",
    )


def construct_params(combo):
    protocol = combo["interaction_protocol"]
    agents = {name: agent_params(combo, "prover") for name in PROVERS[protocol]}
    agents["verifier"] = agent_params(combo, "verifier")
    rounds = {
        "min_message_rounds": combo["min_message_rounds"],
        "max_message_rounds": combo["max_message_rounds"],
    }
    of_protocol = {
        "nip": {"nip": NipProtocolParameters(**rounds)},
        "debate": {
            "debate": DebateProtocolParameters(
                **rounds,
                sequential=combo["debate_sequential"],
            ),
        },
    }
    return HyperParameters(
        scenario=ScenarioType.CODE_VALIDATION,
        trainer=TrainerType.PURE_TEXT_EI,
        text_rl=TextRlParameters(
            num_iterations=combo["num_iterations"],
            rollouts_per_iteration=combo["rollouts_per_iteration"],
            test_scheme=combo["test_scheme"],
            verifier_guess_replacement_proportion=combo["guess_replacement"],
            verifier_guess_replacement_annealing=combo["guess_annealing"],
            verifier_guess_replacement_annealing_rate=combo["guess_annealing_rate"],
        ),
        pure_text_ei=PureTextEiParameters(
            rollout_selection_method=combo["rollout_selection_method"],
            reward_threshold=combo["reward_threshold"],
        ),
        code_validation=CodeValidationParameters(
            agents=AgentsParameters(**agents),
            levels=combo["levels"],
            randomize_prover_stance=combo["randomize_prover_stance"],
        ),
        interaction_protocol=InteractionProtocolType(protocol),
        protocol_common=CommonProtocolParameters(
            shared_reward=combo["shared_reward"],
            verifier_first=combo["verifier_first"],
        ),
        **of_protocol.get(protocol, {}),
        seed=combo["seed"],
    )


def experiment_fn(combo, run_id, **settings):
    run_experiment(
        construct_params(combo),
        run_id=run_id,
        **settings,
    )


def run_preparer_fn(combo):
    return prepare_experiment(construct_params(combo))


def run_all(**settings):
    values = itertools.product(*param_grid.values())
    for number, chosen in enumerate(values):
        combo = dict(zip(param_grid, chosen, strict=True))
        experiment_fn(combo, f"ei_cv_a_{number}", **settings)


if __name__ == "__main__":
    run_all(wandb="offline")
