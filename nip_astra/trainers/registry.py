"""The registry of trainers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from nip_astra.errors import PluginError
from nip_astra.parameters.types import TrainerType
from nip_astra.registry import Registry
from nip_astra.trainers.trainer_base import Trainer

_MODULES = {
    "ast.dpo": ("ast_dpo", "ast_ipo", "ast_simpo"),
    "ast.grpo": ("ast_grpo",),
    "ast.ppo": ("ast_ppo",),
    "ast.reinforce": ("ast_reinforce",),
    "ast.sft": ("ast_sft",),
    "service.remote_api": ("remote_api_grpo", "remote_api_opd", "remote_api_cross_entropy"),
    "service.self_hosted": ("self_hosted_grpo", "self_hosted_opd"),
    "text.expert_iteration": ("pure_text_ei",),
    "text.malt": ("pure_text_malt",),
    "vanilla_ppo": ("mappo",),
}
TRAINERS: Registry[type[Trainer]] = Registry(
    "trainer",
    package="nip_astra.trainers",
    members=TrainerType,
    modules={name: module for module, names in _MODULES.items() for name in names},
)
TrainerClass = TypeVar("TrainerClass", bound=type[Trainer])


def register_trainer(name: str) -> Callable[[TrainerClass], TrainerClass]:
    """Register a `Trainer` subclass under its name for `--trainer`; a decorator.

    `name` is a `TrainerType` member or, for a custom trainer, any string.
    """

    def decorate(cls: TrainerClass) -> TrainerClass:
        if not (isinstance(cls, type) and issubclass(cls, Trainer)):
            raise PluginError(
                f"{getattr(cls, '__name__', cls)!r}, the trainer {str(name)!r}, is not a subclass "
                "of nip_astra.trainers.trainer_base.Trainer. Derive it from that or a family base."
            )
        TRAINERS.register(str(name))(cls)
        return cls

    return decorate
