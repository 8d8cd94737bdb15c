"""nip's trainers of agents with networks: their base class and losses, based on ours."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torchrl.envs.transforms import Compose, Transform

from nip_astra.errors import ConfigurationError
from nip_astra.nip.components import instance_view, unviewed
from nip_astra.nip.running import converted
from nip_astra.nip.views import ProtocolView, Settings, View
from nip_astra.parameters.trainers import CommonPpoParameters, RlTrainerParameters
from nip_astra.progress import IterationContext
from nip_astra.progress import attach_progress_bar as attach_bar
from nip_astra.rl_objectives.ippo import IppoObjective, ReinforceObjective
from nip_astra.rl_objectives.objective import Objective
from nip_astra.rl_objectives.spg import SpgObjective
from nip_astra.rl_objectives.stackelberg import SpgParameters
from nip_astra.trainers.protocol.learning import ReplayBuffer
from nip_astra.trainers.protocol.optimizers import AgentOptimizers
from nip_astra.trainers.reinforce import ReinforceTrainer as OurReinforceTrainer
from nip_astra.trainers.rl_tensordict_base import TensorDictRlTrainer as OurRlTrainer
from nip_astra.trainers.solo_agent import SoloAgentTrainer as OurSoloTrainer
from nip_astra.trainers.spg import SpgTrainer as OurSpgTrainer
from nip_astra.trainers.spg import check_sequence, policy_weights
from nip_astra.trainers.trainer_base import TensorDictTrainer as OurTensorDictTrainer
from nip_astra.trainers.trainer_base import Trainer as OurTrainer
from nip_astra.trainers.vanilla_ppo import VanillaPpoTrainer as OurPpoTrainer

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


def attach_progress_bar(num_iterations_func: Callable[[Any], int]) -> Callable[[Any], Any]:
    """Decorate a loop that takes `iteration_context` by name; see our `attach_progress_bar`."""

    def decorate(loop: Callable[..., Any]) -> Any:
        @functools.wraps(loop)
        def by_name(self: Any, context: IterationContext, *args: Any, **options: Any) -> Any:
            return loop(self, *args, iteration_context=context, **options)

        return attach_bar(num_iterations_func)(by_name)

    return decorate


class JointOptimizer(View):
    """The optimizers of all agents, with `param_groups` as one optimizer has."""

    _viewed: AgentOptimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of weights of all agents, each with its learning rate `lr`."""
        optimizers = self._viewed.optimizers.values()
        return [group for optimizer in optimizers for group in optimizer.param_groups]


class Trainer(OurTrainer):
    """Our base of trainers, for nip's objects and with nip's names in addition.

    Hyper-parameters may be nip's or ours, and components those of `build_scenario_instance` of
    either.

    Attributes
    ----------
    scenario_instance
        Our components, with nip's names: combined parts, datasets, parts of agents.
    settings : Settings
        Also with `logger` and `stat_logger`.
    """

    def __init__(self, hyper_params: Any, scenario_instance: Any, settings: Any = None) -> None:
        instance = unviewed(scenario_instance)
        view = converted(hyper_params, kind=instance.kind)
        super().__init__(view, instance, Settings.of(settings, lambda: self.tracker))
        self.scenario_instance = instance_view(instance, view)

    @property
    def protocol_handler(self) -> Any:
        """The protocol, with the sequence of the section `spg` if it sets one."""
        protocol = unviewed(self.scenario_instance).protocol_handler
        spg = getattr(self.hyper_params, "spg", None)
        sequence = getattr(spg, "stackelberg_sequence", None)
        return ProtocolView(
            protocol, stackelberg_sequence=sequence or protocol.stackelberg_sequence
        )

    @property
    def agent_names(self) -> list[str]:
        """Names in the order of every dimension `A`."""
        names: list[str] = self.protocol_handler.agent_names
        return names

    @property
    def num_agents(self) -> int:
        """Number of agents."""
        return len(self.agent_names)

    @property
    def max_message_rounds(self) -> int:
        """Rounds of the longest episode."""
        rounds: int = self.protocol_handler.max_message_rounds
        return rounds

    @property
    def device(self) -> torch.device:
        """Device of data and agents."""
        return torch.device(unviewed(self.scenario_instance).train_environment.device)

    @property
    def use_single_body(self) -> bool:
        """Whether every agent has one body, for its policy and its value function."""
        agents: Any = self.scenario_instance.agents.values()
        return all(agent.policy_body is None for agent in agents)

    @property
    def use_critic(self) -> bool:
        """Whether agents have value functions."""
        agents: Any = self.scenario_instance.agents.values()
        return any(agent.value_head is not None for agent in agents)

    def save_checkpoint(self, log: bool = True) -> None:
        """Save a checkpoint in the run's folder, which trackers mirror; nothing without a folder.

        `log` has no effect.
        """
        self._save_checkpoint()


class TensorDictTrainer(Trainer, OurTensorDictTrainer):
    """Our base of trainers of local models, with nip's names in addition."""

    sections_of_others: ClassVar[tuple[str, ...]] = ("solo_agent", "reinforce", "spg")


class TensorDictRlTrainer(TensorDictTrainer, OurRlTrainer):
    """Our base of trainers of agents with networks, with nip's names in addition.

    Attributes
    ----------
    policy_operator, value_operator : CombinedAgents
        All agents, for the losses of `nip_astra.nip.rl_objectives`.
    clip_value : float or None
        Clip range of the value loss about the value at collection.
    """

    parameter_groups: ClassVar[tuple[str, ...] | None] = ("rl", "ppo", "message_regression")

    def __init__(self, hyper_params: Any, scenario_instance: Any, settings: Any = None) -> None:
        super().__init__(hyper_params, scenario_instance, settings)
        # Instances of other kinds are refused.
        self.scenario_instance.message_regressor = self.message_regression  # type: ignore[attr-defined]

    @property
    def policy_operator(self) -> Any:
        """All agents, as the argument of a loss."""
        return self.agents

    value_operator = policy_operator

    @property
    def clip_value(self) -> float | None:
        """Clip range of the value loss about the value at collection."""
        return self.rl.clip_value

    def _build_operators(self) -> None:
        """Do nothing: `policy_operator` and `value_operator` are built with the trainer."""

    def _get_optimizer_and_param_freezer(self, loss_module: Any) -> tuple[Any, Any]:
        """Return the optimizers of all agents as one with `param_groups`, and the same as freezer.

        Which agents learn in an iteration is decided by their update schedules.
        """
        trained = {id(weight) for weight in self.optimizers.weights}
        unknown = [
            name for name, weight in loss_module.named_parameters() if id(weight) not in trained
        ]
        if unknown:
            raise ConfigurationError(
                f"the loss has weights {unknown[:3]}, which no agent of this trainer has. Build it "
                "with _get_loss_module_and_gae."
            )
        joint = JointOptimizer(self.optimizers)
        return joint, joint

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


class VanillaPpoTrainer(TensorDictRlTrainer, OurPpoTrainer):
    """Our trainer, for nip's objects and with nip's names in addition."""

    parameter_groups = OurPpoTrainer.parameter_groups
    sections_of_others = OurPpoTrainer.sections_of_others


class ReinforceTrainer(TensorDictRlTrainer, OurReinforceTrainer):
    """Our trainer, for nip's objects and with nip's names in addition."""

    parameter_groups = OurReinforceTrainer.parameter_groups
    sections_of_others = OurReinforceTrainer.sections_of_others


class SpgTrainer(TensorDictRlTrainer, OurSpgTrainer):
    """Our trainer, for nip's objects and with nip's names in addition."""

    parameter_groups = OurSpgTrainer.parameter_groups
    sections_of_others = OurSpgTrainer.sections_of_others


class SoloAgentTrainer(TensorDictTrainer, OurSoloTrainer):
    """Our trainer, for nip's objects and with nip's names in addition."""

    parameter_groups = OurSoloTrainer.parameter_groups
    sections_of_others = OurSoloTrainer.sections_of_others
