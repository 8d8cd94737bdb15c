"""Views of our objects under nip's names, for trainers written for nip."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.protocols.protocol_base import ProtocolHandler


class View:
    """An object with additional names; all others are the object's own."""

    def __init__(self, viewed: Any, **names: Any) -> None:
        self._viewed = viewed
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_viewed":
            raise AttributeError(name)
        return getattr(self._viewed, name)


def view_of(hyper_params: HyperParameters, *, kind: str, is_text: bool) -> Any:
    """Return our hyper-parameters, with nip's names in addition."""
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
    names = {"nip_protocol": "nip", "debate_protocol": "debate", "mnip_protocol": "mnip"}
    return View(
        ours,
        rl=rl,
        ppo=View(ours.ppo, entropy_eps=ours.ppo.entropy_weight, clip_epsilon=ours.ppo.clip_high),
        agents=agents,
        functionalize_modules=False,
        pretrain_agents=ours.rl.pretrain_agents,
        **{name: getattr(ours, here) for name, here in names.items() if hasattr(ours, here)},
    )


class Settings(ExperimentSettings):
    """Our settings, with nip's names in addition."""

    @classmethod
    def of(cls, settings: ExperimentSettings | None) -> Settings:
        """Return the same settings."""
        fields = {} if settings is None else dict(settings)
        return cls.model_construct(**fields)

    @property
    def logger(self) -> logging.Logger:
        """The package's logger."""
        return logging.getLogger("nip_astra")


class ProtocolView(View):
    """A protocol, with nip's names in addition."""

    _viewed: ProtocolHandler

    def get_active_agents_mask_from_rounds_and_seed(
        self, round_id: npt.ArrayLike | Tensor, seed: npt.ArrayLike | Tensor
    ) -> Tensor:
        """Return who may send in which channel, bool `[..., A, C]`."""
        rounds, seeds = (torch.as_tensor(np.asarray(one)) for one in (round_id, seed))
        mask_EAC = self._viewed.active_mask(rounds.reshape(-1), seeds.reshape(-1))
        return mask_EAC.reshape(*rounds.shape, *mask_EAC.shape[1:])
