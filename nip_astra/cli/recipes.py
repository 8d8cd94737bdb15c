"""Commands `task` and `stress`: runs without a parameter file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from nip_astra.cli.options import (
    RUN,
    settings_of,
    shared_options,
    train_or_estimate,
    write_line,
)
from nip_astra.scenario_base.conversation.prompts import DEFAULT_COLUMN

if TYPE_CHECKING:
    from nip_astra.resolving.resolution import ResolvedExperiment

_BY_TRL = "Options by TRL's names"


def _option(name: str, meaning: str, **bounds: Any) -> Any:
    """Return an option under TRL's name, with dashes or underscores."""
    spellings = (f"--{name.replace('_', '-')}", f"--{name}")
    return typer.Option(*dict.fromkeys(spellings), help=meaning, rich_help_panel=_BY_TRL, **bounds)


_SHARED = ("overrides", "seed", "plugin", *RUN, "test_run", "dry_run")


@shared_options(*_SHARED)
def task(
    options: Mapping[str, Any],
    model: Annotated[str, typer.Option(metavar="M", help="Folder of a model, .gguf, or hub id.")],
    data: Annotated[
        str,
        typer.Option(
            metavar="FILE", help="Rows with a prompt: JSONL, CSV, Parquet, or hub:owner/name:split."
        ),
    ],
    reward: Annotated[
        list[str],
        typer.Option(
            metavar="F", help="file.py:function, a registered reward or scorer, or scorer.yaml."
        ),
    ],
    weights: Annotated[
        str | None, typer.Option(metavar="A,B", help="Weight of each reward; 1 by default.")
    ] = None,
    test_data: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Held-out rows; by default a tenth of the prompts."),
    ] = None,
    column: Annotated[
        str,
        typer.Option(metavar="NAME", help="Column of the prompts: texts, or lists of messages."),
    ] = DEFAULT_COLUMN,
    algorithm: Annotated[
        str, typer.Option(metavar="NAME", help="grpo, dr_grpo, dapo, cispo, gspo or rloo.")
    ] = "grpo",
    num_generations: Annotated[
        int | None, _option("num_generations", "Completions per prompt.", min=2)
    ] = None,
    max_completion_length: Annotated[
        int | None, _option("max_completion_length", "Longest completion, in tokens.", min=1)
    ] = None,
    temperature: Annotated[
        float | None, _option("temperature", "Temperature of sampling and of the loss.", min=0)
    ] = None,
    top_p: Annotated[float | None, _option("top_p", "Nucleus of sampling.")] = None,
    top_k: Annotated[int | None, _option("top_k", "Likeliest tokens; 0 for all.", min=0)] = None,
    per_device_train_batch_size: Annotated[
        int | None, _option("per_device_train_batch_size", "Completions per minibatch.", min=1)
    ] = None,
    gradient_accumulation_steps: Annotated[
        int | None, _option("gradient_accumulation_steps", "Minibatches per step.", min=1)
    ] = None,
    max_steps: Annotated[int | None, _option("max_steps", "Optimizer steps.", min=1)] = None,
    learning_rate: Annotated[float | None, _option("learning_rate", "Learning rate.")] = None,
    lr_scheduler_type: Annotated[
        str | None,
        _option("lr_scheduler_type", "linear, cosine, constant or constant_with_warmup."),
    ] = None,
    warmup_steps: Annotated[
        int | None, _option("warmup_steps", "Optimizer steps of linear warm-up.", min=0)
    ] = None,
    weight_decay: Annotated[
        float | None, _option("weight_decay", "Weight decay, but of biases and norms.", min=0)
    ] = None,
    max_grad_norm: Annotated[
        float | None, _option("max_grad_norm", "Largest gradient norm.", min=0)
    ] = None,
    loss_type: Annotated[
        str | None,
        _option("loss_type", "grpo, bnpo, dapo, dr_grpo, cispo, sapo, luspo or vespo."),
    ] = None,
    importance_sampling_level: Annotated[
        str | None, _option("importance_sampling_level", "One ratio per token or per sequence.")
    ] = None,
    epsilon: Annotated[float | None, _option("epsilon", "Clip range of the ratio.", min=0)] = None,
    epsilon_high: Annotated[
        float | None,
        _option("epsilon_high", "Upper clip range, if it differs; cispo: largest ratio.", min=0),
    ] = None,
    delta: Annotated[
        float | None, _option("delta", "Largest ratio at advantages below 0.", min=0)
    ] = None,
    sapo_temperature_pos: Annotated[
        float | None, _option("sapo_temperature_pos", "Temperature of advantages above 0.")
    ] = None,
    sapo_temperature_neg: Annotated[
        float | None, _option("sapo_temperature_neg", "Temperature of the others.")
    ] = None,
    vespo_k_pos: Annotated[
        float | None, _option("vespo_k_pos", "Exponent for advantages from 0.", min=0)
    ] = None,
    vespo_lambda_pos: Annotated[
        float | None, _option("vespo_lambda_pos", "Decay for advantages from 0.", min=0)
    ] = None,
    vespo_k_neg: Annotated[
        float | None, _option("vespo_k_neg", "Exponent for advantages below 0.", min=0)
    ] = None,
    vespo_lambda_neg: Annotated[
        float | None, _option("vespo_lambda_neg", "Decay for advantages below 0.", min=0)
    ] = None,
    beta: Annotated[float | None, _option("beta", "Weight of the KL penalty.", min=0)] = None,
    use_bias_correction_kl: Annotated[
        Literal["true", "false"] | None,
        _option("use_bias_correction_kl", "Multiply it by the ratio: true or false."),
    ] = None,
    scale_rewards: Annotated[str | None, _option("scale_rewards", "group, batch or none.")] = None,
    mask_truncated_completions: Annotated[
        Literal["true", "false"] | None,
        _option("mask_truncated_completions", "Leave out truncated completions: true or false."),
    ] = None,
) -> None:
    """Train a model on a dataset with reward functions, by TRL's conventions."""
    from nip_astra.errors import show_value
    from nip_astra.parameters.files import flatten
    from nip_astra.parameters.parameters_base import TRL_OPTIONS
    from nip_astra.recipes import load_plugins, numbers_of, task_parameters

    load_plugins(options["plugin"] or [])
    trl_options = {name: options[name] for name in TRL_OPTIONS if options.get(name) is not None}
    for name in ("mask_truncated_completions", "use_bias_correction_kl"):
        if name in trl_options:
            trl_options[name] = trl_options[name] == "true"
    parameters = task_parameters(
        model=model,
        data=data,
        rewards=reward,
        weights=None if weights is None else numbers_of(weights),
        test_data=test_data,
        column=column,
        algorithm=algorithm,
        options=trl_options,
    )
    for name, settings in parameters.mapped.items():
        assignments = [f"--set {path}={show_value(value)}" for path, value in flatten(settings)]
        write_line(f"{name}: {' '.join(assignments)}")
    resolved = _print_and_resolve(parameters.values, options)
    train_or_estimate(resolved, settings_of(options), is_dry=options["dry_run"])


def _print_and_resolve(values: Mapping[str, Any], options: Mapping[str, Any]) -> ResolvedExperiment:
    """Print parameters as an equivalent file, and resolve them."""
    from nip_astra.resolving.resolution import resolve_experiment
    from nip_astra.tracking.run_directory import to_yaml

    write_line(f"# as a parameter file:\n{to_yaml(values)}")
    return resolve_experiment(
        hyper_params=values,
        overrides=options["overrides"] or [],
        seed=options["seed"],
        plugins=options["plugin"] or [],
    )


@shared_options(*_SHARED)
def stress(
    options: Mapping[str, Any],
    target: Annotated[
        str,
        typer.Option(
            metavar="M",
            help="Folder of a model, .gguf, hub id, address, file.py:function, or chat_model.yaml.",
        ),
    ],
    scorer: Annotated[
        str, typer.Option(metavar="S", help="Registered scorer, scorer.yaml, or file.py:function.")
    ],
    target_model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the model at an address.")
    ] = None,
    attacker: Annotated[
        str | None,
        typer.Option(metavar="M", help="Attacker before training; by default one that ships."),
    ] = None,
    trainer: Annotated[
        str, typer.Option(metavar="NAME", help="A trainer of stress tests.")
    ] = "ast_dpo",
) -> None:
    """Train an attacker against a target, as rated by a scorer; print the cost first."""
    settings = settings_of(options)
    from nip_astra.recipes import load_plugins, stress_parameters

    load_plugins(options["plugin"] or [])
    values = stress_parameters(
        target=target,
        scorer=scorer,
        target_model=target_model,
        attacker=attacker,
        trainer=trainer,
    )
    resolved = _print_and_resolve(values, options)
    train_or_estimate(resolved, settings, is_dry=True)
    if not options["dry_run"]:
        train_or_estimate(resolved, settings, is_dry=False)
