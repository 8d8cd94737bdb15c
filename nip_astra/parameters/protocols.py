"""Parameters that interaction protocols share."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from nip_astra.parameters.conditions import where
from nip_astra.parameters.parameters_base import SubParameters


class CommonProtocolParameters(SubParameters):
    """Rewards and order that hold for every interaction protocol."""

    prover_reward: Annotated[float, where("shared_reward", False)] = 1.0
    """Reward of a prover that the verifier's decision favours."""
    verifier_reward: float = 1.0
    """Reward of the verifier for a right decision."""
    verifier_incorrect_penalty: float = -1.0
    """Reward of the verifier for a wrong decision. Lower makes it decide with more care."""
    verifier_terminated_penalty: float = -1.0
    """Reward of the verifier when the rounds end without a decision."""
    verifier_no_guess_reward: float = 0.0
    """Reward of the verifier for a turn without a decision. Larger makes conversations longer."""
    shared_reward: bool = False
    """Whether provers get the verifier's reward instead of their own: a cooperative game."""
    force_guess: Literal["zero", "one", "y"] | None = None
    """Decision that counts in place of the verifier's, in its first turn that may decide: always 0,
    always 1, or the true label; null lets the verifier decide."""
    verifier_first: bool = True
    """Whether the verifier has the first turn, where the protocol leaves that open."""
    zero_knowledge: bool = False
    """Whether the protocol is wrapped so that provers are also rewarded for giving nothing away."""


class ZkProtocolParameters(SubParameters):
    """The zero-knowledge wrapper; read where protocol_common.zero_knowledge is true."""

    simulator_reward_coefficient: float = Field(default=1.0, ge=0)
    """Weight of the likeness between simulator and adversarial verifier in both their rewards."""
    aux_prover_reward_coefficient: float = Field(default=1.0, ge=0)
    """Weight of that likeness in the provers' rewards, beside their own. Larger gives away less."""


class BaseRunParameters(SubParameters):
    """A finished run that this one builds on."""

    base_run_type: Literal["none", "parameters", "rerun_tests"] = "none"
    """none: nothing. parameters: the base run's parameters are the defaults of this one's.
    rerun_tests: besides, its trained agents are tested again and nothing is trained."""
    run: str | None = None
    """The base run: a run directory, or wandb://entity/project/run_id."""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.base_run_type == "none" and self.run is not None:
            raise ValueError("names a run but not what to take from it; give base_run_type")
        if self.base_run_type != "none" and self.run is None:
            raise ValueError("says what to take from a run but names none; give run")
        return self
