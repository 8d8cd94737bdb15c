"""nip's trainers of agents with networks: their base class and losses, based on ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torchrl.envs.transforms import Compose, Transform

from nip_astra.errors import ConfigurationError
from nip_astra.nip.views import ProtocolView, Settings, View, view_of
from nip_astra.parameters.trainers import CommonPpoParameters, RlTrainerParameters
from nip_astra.rl_objectives.ippo import IppoObjective, ReinforceObjective
from nip_astra.rl_objectives.objective import Objective
from nip_astra.rl_objectives.spg import SpgObjective
from nip_astra.rl_objectives.stackelberg import SpgParameters
from nip_astra.trainers.protocol.learning import ReplayBuffer
from nip_astra.trainers.rl_tensordict_base import TensorDictRlTrainer as OurTrainer
from nip_astra.trainers.spg import check_sequence, policy_weights

REWARD = ("next", "agents", "reward")
REWARD_TO_GO = ("agents", "reward_to_go")
KEYS = {
    "reward": ("agents", "reward"),
    "sample_log_prob": ("agents", "sample_log_prob"),
    "value": ("agents", "value"),
    "advantage": ("agents", "advantage"),
    "value_target": ("agents", "value_target"),
    "done": ("agents", "done"),
    "terminated": ("agents", "terminated"),
}
"""Entries of a batch that nip's losses are configured to read."""


class Reward2GoTransform(Transform):
    """Sets the discount of rewards to go, which the trainer computes.

    Raises
    ------
    ConfigurationError
        For entries other than an agent's reward and reward to go.
    """

    def __init__(
        self,
        gamma: float = 0.99,
        in_keys: Any = REWARD,
        out_keys: Any = REWARD_TO_GO,
        done_key: Any = KEYS["done"],
    ) -> None:
        super().__init__()
        named = (_one(in_keys), _one(out_keys), _one(done_key))
        if named != (REWARD, REWARD_TO_GO, KEYS["done"]):
            raise ConfigurationError(
                f"Reward2GoTransform does not support the keys {named}, only {REWARD} and "
                f"{REWARD_TO_GO}. Leave the keys out."
            )
        self.gamma = gamma


def _one(keys: Any) -> Any:
    """Return a key, also if it is alone in a list."""
    return tuple(keys[0]) if len(keys) == 1 else tuple(keys)


class _Keys(Objective):
    """Accepts names of entries as set by nip's trainers."""

    def set_keys(self, **keys: Any) -> None:
        """Accept nip's entries, which are the ones that are read.

        Raises
        ------
        ConfigurationError
            For any other.
        """
        others = {
            name: key
            for name, key in keys.items()
            if name != "action" and tuple(key) != KEYS.get(name)
        }
        if others:
            raise ConfigurationError(
                f"{others}: these losses read fixed entries: {KEYS}. Write an Objective of your "
                "own for others."
            )


KL_NAMES = {
    "dtarg": "kl_target",
    "beta": "kl_beta",
    "increment": "kl_increment",
    "decrement": "kl_decrement",
}
"""nip's names of the parameters of the KL penalty."""


def _parameters(
    functional: bool,
    loss_critic_type: str = "smooth_l1",
    clip_value: float | bool | None = None,
    **ppo: Any,
) -> tuple[CommonPpoParameters, RlTrainerParameters]:
    """Return the objectives' parameters from `ppo` and `rl`; True clips values like ratios."""
    if functional:
        raise ConfigurationError("functional=True: weights stay in their modules. Leave it out.")
    ppo["entropy_weight"] = ppo.pop("entropy_coef", 0.01)
    if "clip_epsilon" in ppo:
        ppo["clip_low"] = ppo["clip_high"] = ppo.pop("clip_epsilon")
    of_ppo = CommonPpoParameters.from_dict(ppo)
    clip = of_ppo.clip_high if clip_value is True else clip_value or None
    rl = RlTrainerParameters.from_dict({"loss_critic_type": loss_critic_type, "clip_value": clip})
    return of_ppo, rl


class ClipPPOLossImproved(_Keys, IppoObjective):
    """Clipped policy loss, value loss and entropy bonus: `IppoObjective` under nip's name.

    Parameters
    ----------
    actor, critic : CombinedAgents
        The trainer's `policy_operator` and `value_operator`: all agents.
    **options
        `clip_epsilon`, `entropy_coef`, `critic_coef`, `normalize_advantage`, `loss_critic_type`
        and `clip_value`.
    """

    def __init__(
        self, actor: Any, critic: Any = None, *, functional: bool = False, **options: Any
    ) -> None:
        super().__init__(actor, *_parameters(functional, **options))


class KLPENPPOLossImproved(ClipPPOLossImproved):
    """The same with a KL penalty instead of the clip.

    Parameters
    ----------
    **options
        Also `dtarg`, `beta`, `increment` and `decrement`.
    """

    def __init__(self, actor: Any, critic: Any = None, **options: Any) -> None:
        ours = {KL_NAMES.get(name, name): value for name, value in options.items()}
        super().__init__(actor, critic, loss_type="kl_penalty", **ours)


class ReinforceLossImproved(_Keys, ReinforceObjective):
    """`ReinforceObjective` under nip's name."""

    def __init__(
        self,
        actor_network: Any,
        critic_network: Any = None,
        *,
        loss_weighting_type: Literal["advantage", "reward_to_go"] = "reward_to_go",
        gamma: float = 0.99,
        functional: bool = False,
        loss_critic_type: str = "smooth_l1",
        clip_value: float | bool | None = None,
    ) -> None:
        _, rl = _parameters(functional, loss_critic_type, clip_value)
        super().__init__(actor_network, rl, weight=loss_weighting_type)
        self._gamma = gamma

    def make_value_estimator(self, value_type: Any = None, **hyperparams: Any) -> Objective:
        return super().make_value_estimator(value_type, **{"gamma": self._gamma, **hyperparams})


class SpgLoss(_Keys, SpgObjective):
    """`SpgObjective` under nip's name, for a constant learning rate.

    Parameters
    ----------
    agents, device
        Those of the actor.
    **options
        As of `ClipPPOLossImproved`.
    """

    def __init__(
        self,
        actor: Any,
        critic: Any = None,
        *,
        variant: str = "spg",
        stackelberg_sequence: Sequence[Sequence[str]],
        agent_names: Sequence[str],
        agents: Mapping[str, Any],
        ihvp_arguments: Mapping[str, Any],
        additional_lola_term: bool = True,
        sos_scaling_factor: float = 0.5,
        sos_threshold_factor: float = 0.1,
        agent_lr_factors: Mapping[str, Any],
        lr: float,
        functional: bool = False,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        parameters = SpgParameters.from_dict(
            {
                "variant": variant,
                "additional_lola_term": additional_lola_term,
                "sos_scaling_factor": sos_scaling_factor,
                "sos_threshold_factor": sos_threshold_factor,
                **{f"ihvp_{name}": value for name, value in ihvp_arguments.items()},
            }
        )
        super().__init__(
            actor,
            *_parameters(functional, **options),
            policy_parameters={name: policy_weights(actor[name]) for name in agent_names},
            groups=check_sequence(stackelberg_sequence, agent_names),
            rule=parameters,
            step_sizes=lambda: [lr * agent_lr_factors[name].actor for name in agent_names],
            key=("spg", "ihvp"),
        )


class TensorDictRlTrainer(OurTrainer):
    """Our base of trainers of agents with networks, with nip's names in addition.

    Attributes
    ----------
    policy_operator, value_operator : CombinedAgents
        All agents, for the losses of `nip_astra.nip.rl_objectives`.
    clip_value : float or None
        Clip range of the value loss about the value at collection.
    """

    parameter_groups: ClassVar[tuple[str, ...] | None] = ("rl", "ppo", "message_regression")
    sections_of_others: ClassVar[tuple[str, ...]] = ("solo_agent", "reinforce", "spg")

    def __init__(self, hyper_params: Any, scenario_instance: Any, settings: Any = None) -> None:
        view = view_of(hyper_params, kind=scenario_instance.kind, is_text=False)
        super().__init__(view, scenario_instance, Settings.of(settings))
        whole = scenario_instance.combined_agents
        parts = ("body", "policy_body", "value_body", "policy_head", "value_head")
        names = {f"combined_{part}": whole for part in parts}
        names["message_regressor"] = self.message_regression
        self.scenario_instance = View(scenario_instance, **names)  # type: ignore[assignment]

    @property
    def policy_operator(self) -> Any:
        """All agents, as the argument of a loss."""
        return self.agents

    value_operator = policy_operator

    @property
    def clip_value(self) -> float | None:
        """Clip range of the value loss about the value at collection."""
        return self.rl.clip_value

    @property
    def protocol_handler(self) -> Any:
        """The protocol, with the sequence of the section `spg` if it sets one."""
        protocol = self.train_environment.protocol
        sequence = self.hyper_params.spg.stackelberg_sequence  # type: ignore[attr-defined]  # a section
        return ProtocolView(
            protocol, stackelberg_sequence=sequence or protocol.stackelberg_sequence
        )

    @property
    def agent_names(self) -> tuple[str, ...]:
        """Names in the order of every dimension `A`."""
        return self.agents.names

    @property
    def device(self) -> torch.device:
        """Device of the agents."""
        return torch.device(self.train_environment.device)

    def _get_replay_buffer(self, transform: Transform | None = None) -> ReplayBuffer:
        """Return the buffer that splits an iteration's frames into minibatches.

        Raises
        ------
        ConfigurationError
            For a transform other than `Reward2GoTransform`.
        """
        transforms = list(transform) if isinstance(transform, Compose) else [transform]
        for one in transforms:
            if isinstance(one, Reward2GoTransform):
                self.reward_to_go_gamma = one.gamma
            elif one is not None:
                raise ConfigurationError(
                    f"a buffer takes Reward2GoTransform, not {type(one).__name__}. Change batches "
                    "in `collect` instead."
                )
        return super()._get_replay_buffer()
