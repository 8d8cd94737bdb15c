"""Views of our objects under nip's names, for trainers written for nip."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDictBase
from torch import Tensor

from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.protocols.protocol_base import Moves, ProtocolHandler
from nip_astra.tracking.tracker import Tracker, plain_numbers


class View:
    """An object with additional names; all others are the object's own, or those of `fallback`."""

    def __init__(self, viewed: Any, *, fallback: Any = None, **names: Any) -> None:
        self._viewed = viewed
        self._fallback = fallback
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_viewed", "_fallback"):
            raise AttributeError(name)
        if self._fallback is not None and not hasattr(self._viewed, name):
            return getattr(self._fallback, name)
        return getattr(self._viewed, name)


def view_of(
    hyper_params: HyperParameters, *, kind: str, is_text: bool, original: Any = None
) -> Any:
    """Return our hyper-parameters, with nip's names in addition.

    Parameters
    ----------
    original : optional
        nip's, which ours were made from; it has the names that ours lack.
    """
    if isinstance(hyper_params, View):
        return hyper_params
    ours = hyper_params
    rl: Any = ours.rl
    if is_text:
        text = ours.text_rl
        rl = View(
            ours.rl,
            num_iterations=text.num_iterations,
            rollouts_per_iteration=text.rollouts_per_iteration,
        )
    agents = getattr(getattr(ours, kind, None), "agents", {})
    solo: Any = getattr(ours, "solo_agent", None)
    if solo is not None:
        solo = View(solo, learning_rate=solo.lr, batch_size=solo.minibatch_size)
    test_size = original.test_size if original is not None else getattr(solo, "test_share", None)
    names = {"nip_protocol": "nip", "debate_protocol": "debate", "mnip_protocol": "mnip"}
    return View(
        ours,
        fallback=original,
        rl=rl,
        solo_agent=solo,
        test_size=test_size,
        ppo=View(ours.ppo, entropy_eps=ours.ppo.entropy_weight, clip_epsilon=ours.ppo.clip_high),
        agents=agents,
        functionalize_modules=False,
        pretrain_agents=ours.rl.pretrain_agents,
        **{name: getattr(ours, here) for name, here in names.items() if hasattr(ours, here)},
    )


class StatLogger:
    """Logs the figures of a run, as nip's does.

    Parameters
    ----------
    tracker : callable
        Returns the run's tracker, which a trainer gets after its construction.
    """

    def __init__(self, tracker: Callable[[], Tracker]) -> None:
        self._tracker = tracker
        self._step = 0

    def log(self, data: Mapping[str, Any], step: int | None = None) -> None:
        """Log figures after an iteration, which nip counts from 0; by default after the last."""
        self._step = self._step if step is None else step + 1
        self._tracker().log_metrics(plain_numbers(data), step=self._step)


class Settings(ExperimentSettings):
    """Our settings, with nip's names in addition.

    Attributes
    ----------
    stat_logger : StatLogger
        Logs figures of the trainer that has these settings; nothing without one.
    """

    _stat_logger: StatLogger | None = None

    @classmethod
    def of(
        cls, settings: ExperimentSettings | None, tracker: Callable[[], Tracker] = Tracker
    ) -> Settings:
        """Return the same settings, of the trainer with a tracker."""
        fields = {} if settings is None else dict(settings)
        made = cls.model_construct(**fields)
        made._stat_logger = StatLogger(tracker)
        return made

    @property
    def logger(self) -> logging.Logger:
        """The package's logger."""
        return logging.getLogger("nip_astra")

    @property
    def stat_logger(self) -> StatLogger:
        """Logs figures."""
        return self._stat_logger or StatLogger(Tracker)

    @property
    def profiler(self) -> None:
        """None: runs profile themselves."""
        return

    @property
    def wandb_run(self) -> None:
        """None: trackers mirror the run directory."""
        return


class ProtocolView(View):
    """A protocol, with nip's names in addition.

    Attributes
    ----------
    agent_names, prover_names, verifier_names, message_channel_names : list of str
        In the order of the dimensions.
    """

    _viewed: ProtocolHandler

    def __init__(self, protocol: ProtocolHandler, **names: Any) -> None:
        lists = ("agent_names", "prover_names", "verifier_names", "message_channel_names")
        super().__init__(protocol, **{name: list(getattr(protocol, name)) for name in lists})
        self.__dict__.update(names)

    @property
    def num_message_channels(self) -> int:
        """Number of channels."""
        return self._viewed.num_channels

    @property
    def verifier_name(self) -> str:
        """The verifier; the first, if there are several."""
        return self._viewed.verifier_names[0]

    @property
    def verifier_index(self) -> int:
        """Index of the verifier."""
        return self._viewed.agent_names.index(self.verifier_name)

    @property
    def base_protocol(self) -> ProtocolView:
        """The protocol that a zero-knowledge protocol extends."""
        base: ProtocolHandler = self._viewed.base  # type: ignore[attr-defined]  # only there
        return ProtocolView(base)

    def can_agent_see_channel(self, agent_name: str, channel_name: str) -> bool:
        """Return whether an agent sees a channel."""
        return (agent_name, channel_name) in set(self._viewed.agent_channel_visibility)

    def get_verifier_guess_mask_from_rounds_and_seed(
        self, round_id: npt.ArrayLike | Tensor, seed: npt.ArrayLike | Tensor
    ) -> Tensor:
        """Return where the verifier may send and therefore decide, bool `[...]`."""
        mask = self.get_active_agents_mask_from_rounds_and_seed(round_id, seed)
        return mask[..., self.verifier_index, :].any(dim=-1)

    def step_interaction_protocol(
        self, env_td: TensorDictBase
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the result of the moves of a round.

        Parameters
        ----------
        env_td : TensorDictBase
            `[...]` with nip's entries `round`, `seed`, `y`, `done`, and under `agents` `decision`
            and `done` [..., A], for zero knowledge also `main_message_logits` and
            `decision_logits`.

        Returns
        -------
        done, agent_done, terminated, reward : Tensor
            bool `[...]` and `[..., A]`: who has decided, now or before; bool `[...]`: whether the
            rounds are over; float `[..., A]`.
        """
        shape, protocol = env_td["round"].shape, self._viewed
        count, num_agents = shape.numel(), protocol.num_agents
        agents = env_td["agents"]
        # A base protocol reads the moves of its own agents, which come first.
        before = agents["done"][..., :num_agents]
        decision_EA = agents["decision"][..., :num_agents].reshape(count, num_agents)
        message_logits = decision_logits = None
        if protocol.needs_logits:
            message_logits = agents["main_message_logits"]
            message_logits = message_logits.reshape(count, *message_logits.shape[len(shape) :])
            decision_logits = agents["decision_logits"].reshape(count, num_agents, 3)
        step = protocol.step(
            env_td["round"].reshape(count),
            env_td["seed"].reshape(count),
            env_td["y"].reshape(count),
            # nip rewards moves also after a decision.
            torch.zeros(count, num_agents, dtype=torch.bool),
            Moves(decision_EA, message_logits, decision_logits),
        )
        has_decided = step.agent_decided_EA.reshape(*shape, num_agents) | before
        is_verifier_A = torch.tensor([name in self.verifier_names for name in self.agent_names])
        done_before = env_td["done"].reshape(shape)
        done = has_decided[..., is_verifier_A].all(dim=-1) | done_before
        # All others are done with the episode.
        agent_done = torch.where(is_verifier_A, has_decided, done[..., None])
        terminated = step.is_out_of_rounds_E.reshape(shape)
        reward = step.reward_EA.reshape(*shape, num_agents)
        if hasattr(protocol, "base"):
            terminated = self.base_protocol.step_interaction_protocol(env_td)[2]
        else:
            # Passing a turn is rewarded only before the episode's end.
            has_passed = ~step.has_decided_E.reshape(shape) & ~terminated
            reward = reward.masked_fill((done_before & has_passed)[..., None], 0.0)
        return done, agent_done, terminated, reward

    def get_active_agents_mask_from_rounds_and_seed(
        self, round_id: npt.ArrayLike | Tensor, seed: npt.ArrayLike | Tensor
    ) -> Tensor:
        """Return who may send in which channel, bool `[..., A, C]`."""
        rounds, seeds = (torch.as_tensor(np.asarray(one)) for one in (round_id, seed))
        mask_EAC = self._viewed.active_mask(rounds.reshape(-1), seeds.reshape(-1))
        return mask_EAC.reshape(*rounds.shape, *mask_EAC.shape[1:])
