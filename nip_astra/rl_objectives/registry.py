"""Registries of policy losses and advantages, and the check of their options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, get_type_hints

from pydantic import BeforeValidator, TypeAdapter, ValidationError
from torch import Tensor

from nip_astra.errors import ConfigurationError, UnknownNameError
from nip_astra.parameters.conditions import ReadWhere
from nip_astra.parameters.parameters_base import RegisteredName
from nip_astra.registry import Registry

POLICY_LOSSES: Registry[Callable[..., Tensor]] = Registry("policy_loss")
ADVANTAGES: Registry[Callable[..., Any]] = Registry("advantage")

OLD_LOSS_NAMES = {"clipped": "ppo"}
"""Names of policy losses in earlier versions."""


def register_policy_loss(name: str) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Register a policy loss for trainers of all families; a decorator.

    The function takes `(logprobs_BT, old_logprobs_BT, advantages_BT, mask_BT)` and gives the loss
    of each token, `[B, T]`, to be minimised. Its keyword arguments are its options
    (`loss_options` in a parameter file). See `rl_objectives.policy_losses`.

        @na.register_policy_loss("mine")
        def mine(logprobs_BT, old_logprobs_BT, advantages_BT, mask_BT, *, epsilon: float = 0.2):
            ratio_BT = (logprobs_BT - old_logprobs_BT).exp()
            clipped_BT = ratio_BT.clamp(1 - epsilon, 1 + epsilon)
            return -torch.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
    """
    names = ("logprobs_BT", "old_logprobs_BT", "advantages_BT", "mask_BT")
    return _register(POLICY_LOSSES, name, names)


def register_advantage(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register an advantage for trainers that compare samples of a group; a decorator.

    The function takes `(rewards_N, group_N, run_N)` and gives advantages `[N]`, or a
    `GroupAdvantages`. A reward is NaN where there is no verdict; `group_N` and `run_N` are int64,
    `run_N` may be None. Its keyword arguments are its options (`advantage_options`).
    """
    return _register(ADVANTAGES, name, ("rewards_N", "group_N", "run_N"))


def _register(
    registry: Registry[Callable[..., Any]], name: str, arguments: Sequence[str]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function that takes the arguments by position, and options by keyword."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            inspect.signature(function).bind(*arguments, **options_of(function))
        except TypeError as error:
            raise ConfigurationError(
                f"the {registry.kind.replace('_', ' ')} {name!r} cannot be called: {error}. It "
                f"takes ({', '.join(arguments)}), and options by keyword only, after a `*`."
            ) from error
        return registry.register(name)(function)

    return decorate


def options_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the options of a function with their defaults: its keyword-only arguments."""
    parameters = inspect.signature(function).parameters.values()
    return {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY}


@lru_cache
def _adapter_of(function: Callable[..., Any], option: str) -> TypeAdapter[Any]:
    return TypeAdapter(get_type_hints(function).get(option, Any))


def with_options(
    registry: Registry[Callable[..., Any]], name: str, given: Mapping[str, Any]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return a registered function and all of its options, defaults included.

    Raises
    ------
    UnknownNameError
        For an unknown function or option.
    ConfigurationError
        For a missing option, or a value of another type.
    """
    function = registry.get(name)
    options = options_of(function)
    words = f"the {registry.kind.replace('_', ' ')} {name!r}"
    for option in given:
        if option not in options:
            raise UnknownNameError("option", option, options, f"They are those of {words}.")
    try:
        checked = {
            option: _adapter_of(function, option).validate_python(value)
            for option, value in given.items()
        }
    except ValidationError as error:
        raise ConfigurationError(
            f"wrong option of {words}: {error.errors()[0]['msg']} (got "
            f"{error.errors()[0]['input']!r}). Options: {dict(given)}."
        ) from error
    chosen = options | checked
    missing = [option for option, value in chosen.items() if value is inspect.Parameter.empty]
    if missing:
        raise ConfigurationError(f"{words} needs the option {missing[0]!r}. Set it.")
    return function, chosen


def has_option(option: str) -> ReadWhere:
    """Condition of a parameter: the policy loss named by `loss` has this option."""

    def is_met(loss: Any) -> bool:
        return loss is None or option in options_of(POLICY_LOSSES.get(loss))

    return ReadWhere("loss", is_met, f"names a policy loss with the option {option}")


def _current_name(name: Any) -> Any:
    return OLD_LOSS_NAMES.get(name, name) if isinstance(name, str) else name


PolicyLossName = Annotated[str, RegisteredName(POLICY_LOSSES), BeforeValidator(_current_name)]
"""A name in `POLICY_LOSSES`."""
AdvantageName = Annotated[str, RegisteredName(ADVANTAGES)]
"""A name in `ADVANTAGES`."""
