"""TRL's options of GRPO as parameters: a run with options by TRL's names is what TRL runs.

TRL here is `trl.GRPOConfig` of version 1.16. Its names can differ from ours in meaning: `epsilon`
is a distance from 1 except in cispo, `max_steps` counts optimizer steps, a batch is one of
completions. Only the meaning of TRL's names is TRL's; parameters by our names keep their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nip_astra.errors import ConfigurationError, UnknownNameError
from nip_astra.parameters.parameters_base import TRL_OPTIONS

TRAINER = "self_hosted_grpo"
LOSS = f"{TRAINER}.policy_loss"

LOSS_TYPES: Mapping[str, Mapping[str, str]] = {
    "grpo": {"loss": "ppo", "reduction": "sequence"},
    "bnpo": {"loss": "ppo", "reduction": "minibatch_token"},
    "dapo": {"loss": "ppo", "reduction": "token"},
    "dr_grpo": {"loss": "ppo", "reduction": "sum_over_length"},
    "luspo": {"loss": "ppo", "reduction": "sequence_sum"},
    "cispo": {"loss": "cispo", "reduction": "token"},
    "sapo": {"loss": "sapo", "reduction": "sequence"},
    "vespo": {"loss": "vespo", "reduction": "token"},
}
"""Parameters of `policy_loss` for the values of `loss_type`, with one ratio per token."""
SCALES = {"group": "group", "batch": "batch", "none": "none", "true": "group", "false": "none"}
"""Our `scale` for the values of `scale_rewards`."""
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
"""Our `lr_schedule` for the values of `lr_scheduler_type`."""
LEVELS = ("token", "sequence")
"""Values of `importance_sampling_level`."""
LOSS_OPTIONS: Mapping[str, tuple[str, str]] = {
    "delta": ("ppo", "dual_clip"),
    "sapo_temperature_pos": ("sapo", "temperature_positive"),
    "sapo_temperature_neg": ("sapo", "temperature_negative"),
    "vespo_k_pos": ("vespo", "k_positive"),
    "vespo_lambda_pos": ("vespo", "lambda_positive"),
    "vespo_k_neg": ("vespo", "k_negative"),
    "vespo_lambda_neg": ("vespo", "lambda_negative"),
}
"""The policy loss that has an option, and its name there."""

EPSILON, BATCH_SIZE, NUM_GENERATIONS, STD_EPSILON = 0.2, 8, 8, 1e-4
"""TRL's `epsilon`, `per_device_train_batch_size` and `num_generations` by default, and the number
that it adds to a standard deviation of rewards."""

Settings = dict[str, Any]
"""Values by the path of a parameter."""


def map_trl_options(
    options: Mapping[str, Any], variant: Mapping[str, Any], training: Mapping[str, Any]
) -> dict[str, Settings]:
    """Return parameters for each option by TRL's name, and under "" those of TRL's defaults.

    Parameters
    ----------
    options : Mapping
        Values by name, of `TRL_OPTIONS`.
    variant : Mapping
        Parameters of the trainer by the chosen algorithm, which options replace.
    training : Mapping
        Parameters of `training` that apply without TRL's batch options.

    Raises
    ------
    UnknownNameError
        For an option, or a value of a choice, that TRL has and we lack.
    ConfigurationError
        For values that do not go together.
    """
    for name in options:
        if name not in TRL_OPTIONS:
            raise UnknownNameError("option of a task", name, TRL_OPTIONS)
    mapped: dict[str, Settings] = {}
    loss = _choose_loss(options, variant["policy_loss"])
    for name, value in options.items():
        if name in _CONVERTED:
            mapped[name] = _CONVERTED[name](value)
        elif name in LOSS_OPTIONS:
            mapped[name] = _map_loss_option(name, value, loss["loss"])
        elif name not in _JOINT:
            mapped[name] = {TRL_OPTIONS[name]: value}
    if "loss_type" in options or "importance_sampling_level" in options:
        name = "loss_type" if "loss_type" in options else "importance_sampling_level"
        mapped[name] = {f"{LOSS}.{part}": value for part, value in loss.items()}
    defaults = _map_clip(options, loss["loss"], mapped)
    _map_kl(options, mapped)
    defaults |= _map_batch(options, training, mapped)
    defaults |= _map_schedule(options, mapped)
    scale = next(iter(mapped["scale_rewards"].values()), None) if "scale_rewards" in mapped else ""
    if (scale or variant["scale"]) != "none":
        defaults[f"{TRAINER}.std_epsilon"] = STD_EPSILON
    return {"": defaults, **mapped}


_JOINT = (
    *("loss_type", "importance_sampling_level", "epsilon", "epsilon_high"),
    *("beta", "use_bias_correction_kl", "lr_scheduler_type", "warmup_steps", "max_steps"),
    *("per_device_train_batch_size", "gradient_accumulation_steps"),
)
"""Options whose meaning depends on others."""


def _convert_scale(value: Any) -> Settings:
    if str(value).lower() not in SCALES:
        raise UnknownNameError("scale_rewards", str(value), SCALES)
    return {TRL_OPTIONS["scale_rewards"]: SCALES[str(value).lower()]}


def _convert_temperature(value: Any) -> Settings:
    # TRL divides logits by the temperature in the loss, too.
    return {TRL_OPTIONS["temperature"]: value, f"{LOSS}.logprobs": "tempered"}


def _convert_top_k(value: Any) -> Settings:
    return {TRL_OPTIONS["top_k"]: None if value == 0 else value}


def _convert_weight_decay(value: Any) -> Settings:
    if _number("weight_decay", value) == 0:
        return {TRL_OPTIONS["weight_decay"]: value}
    # transformers leaves out biases and norms.
    return {TRL_OPTIONS["weight_decay"]: value, "training.decays_vectors": False}


_CONVERTED: Mapping[str, Callable[[Any], Settings]] = {
    "scale_rewards": _convert_scale,
    "temperature": _convert_temperature,
    "top_k": _convert_top_k,
    "weight_decay": _convert_weight_decay,
}


# ---- the loss


def _choose_loss(options: Mapping[str, Any], policy_loss: Mapping[str, Any]) -> dict[str, str]:
    """Return policy loss and reduction."""
    chosen = {"loss": policy_loss["loss"], "reduction": policy_loss["reduction"]}
    loss_type = options.get("loss_type")
    if loss_type is not None:
        if loss_type not in LOSS_TYPES:
            raise UnknownNameError("loss_type", str(loss_type), LOSS_TYPES)
        chosen = dict(LOSS_TYPES[loss_type])
    level = options.get("importance_sampling_level")
    if level is None:
        return chosen
    if level not in LEVELS:
        raise UnknownNameError("importance_sampling_level", str(level), LEVELS)
    if chosen["loss"] not in ("ppo", "gspo") or (level == "token" and chosen["loss"] == "gspo"):
        raise ConfigurationError(
            f"the loss {chosen['loss']} has no importance_sampling_level {level}. Leave it out, or "
            "take loss_type grpo, bnpo, dapo, dr_grpo or luspo."
        )
    if level == "sequence":
        chosen["loss"] = "luspo" if loss_type == "luspo" else "gspo"
    return chosen


def _map_loss_option(name: str, value: Any, loss: str) -> Settings:
    owner, option = LOSS_OPTIONS[name]
    if loss != owner:
        raise ConfigurationError(f"{name} is an option of the loss {owner}, not of {loss}.")
    return {f"{LOSS}.loss_options": {option: value}}


def _map_clip(options: Mapping[str, Any], loss: str, mapped: dict[str, Settings]) -> Settings:
    """Map `epsilon` and `epsilon_high`; return the clip range by TRL's default, if it applies."""
    given = [name for name in ("epsilon", "epsilon_high") if name in options]
    if loss in ("sapo", "vespo"):
        if given:
            raise ConfigurationError(f"the loss {loss} has no clip range. Leave out {given[0]}.")
        return {}
    if not given and "loss_type" not in options and "importance_sampling_level" not in options:
        # The algorithm's own.
        return {}
    low = _number("epsilon", options.get("epsilon", EPSILON))
    high = _number("epsilon_high", options.get("epsilon_high", low))
    if loss == "cispo":
        # The upper bound of a ratio itself, and no lower one: clip_low 1 bounds it by 0.
        bounds: Settings = {f"{LOSS}.clip_low": 1.0}
        if high >= 1:
            bounds[f"{LOSS}.clip_high"] = high - 1
        elif high > 0:
            bounds[f"{LOSS}.loss_options"] = {"clip_high": high - 1}
        else:
            raise ConfigurationError("epsilon_high, cispo's largest ratio, is 0. Set it to 5.")
        if not given:
            return bounds
        mapped[given[-1]] = bounds
        return {}
    bounds = {f"{LOSS}.clip_low": low, f"{LOSS}.clip_high": high}
    if "epsilon_high" in options:
        mapped["epsilon_high"] = {f"{LOSS}.clip_high": bounds.pop(f"{LOSS}.clip_high")}
    if "epsilon" in options:
        mapped["epsilon"] = bounds
        return {}
    return bounds


def _map_kl(options: Mapping[str, Any], mapped: dict[str, Settings]) -> None:
    """Map the KL penalty: the estimator k3, times the ratio by `use_bias_correction_kl`."""
    is_weighted = options.get("use_bias_correction_kl", True)
    if "beta" not in options:
        if "use_bias_correction_kl" in options:
            raise ConfigurationError("use_bias_correction_kl has no effect without beta. Give it.")
        return
    mapped["beta"] = {TRL_OPTIONS["beta"]: options["beta"]}
    if _number("beta", options["beta"]) > 0:
        mapped["beta"] |= {f"{LOSS}.kl.gradient": "k3", f"{LOSS}.kl.by_ratio": is_weighted}


# ---- batches and steps


def _map_batch(
    options: Mapping[str, Any], training: Mapping[str, Any], mapped: dict[str, Settings]
) -> Settings:
    """Map batch sizes so that each iteration is one optimizer step on its own completions.

    TRL generates the completions of one optimizer step at a time, and compares the
    `num_generations` of a problem.
    """
    group_size = _count("num_generations", options.get("num_generations", NUM_GENERATIONS))
    if "max_steps" in options:
        mapped["max_steps"] = {TRL_OPTIONS["max_steps"]: options["max_steps"]}
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    given = [name for name in names if name in options]
    if not given:
        rows = training["num_episodes_per_experience"] * group_size
        num_minibatches = -(-rows // training["minibatch_size"])
        return {TRL_OPTIONS["gradient_accumulation_steps"]: num_minibatches}
    size = _count(names[0], options.get(names[0], BATCH_SIZE))
    num_minibatches = _count(names[1], options.get(names[1], 1))
    num_problems, num_left = divmod(size * num_minibatches, group_size)
    if num_left:
        raise ConfigurationError(
            f"a batch of {size} x {num_minibatches} completions has no whole groups of "
            f"{group_size}. Set per_device_train_batch_size x gradient_accumulation_steps to a "
            "multiple of num_generations."
        )
    values = {TRL_OPTIONS[names[0]]: size, TRL_OPTIONS[names[1]]: num_minibatches}
    for name in given:
        mapped[name] = {TRL_OPTIONS[name]: values.pop(TRL_OPTIONS[name])}
    return values | {"training.num_episodes_per_experience": num_problems}


def _map_schedule(options: Mapping[str, Any], mapped: dict[str, Settings]) -> Settings:
    """Map the schedule, which goes by optimizer steps; linear by default."""
    defaults: Settings = {"training.schedules_steps": True}
    name = options.get("lr_scheduler_type", "linear")
    # An enum's member in TRL.
    name = getattr(name, "value", name)
    if name not in SCHEDULES:
        raise UnknownNameError("lr_scheduler_type", str(name), SCHEDULES)
    schedule = {TRL_OPTIONS["lr_scheduler_type"]: SCHEDULES[name]}
    if "lr_scheduler_type" in options:
        mapped["lr_scheduler_type"] = schedule
    else:
        defaults |= schedule
    if "warmup_steps" in options:
        if name == "constant":
            raise ConfigurationError(
                "lr_scheduler_type constant has no warmup_steps. Use constant_with_warmup."
            )
        mapped["warmup_steps"] = {TRL_OPTIONS["warmup_steps"]: options["warmup_steps"]}
    return defaults


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ConfigurationError(f"{name} is {value!r}. Give a number of at least 0.")
    return float(value)


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{name} is {value!r}. Give a whole number of at least 1.")
    return value
