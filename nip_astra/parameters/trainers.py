"""Parameters that several trainers of interaction protocols share.

What one trainer alone reads stands in its nested class `Parameters`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from nip_astra.parameters.conditions import where, where_given
from nip_astra.parameters.parameters_base import MAX_LR, PlainText, SubParameters
from nip_astra.parameters.text import TextRlParameters as TextRlParameters

LossCriticType = Literal["l1", "l2", "smooth_l1"]
"""Distances between values and their targets."""


class RlTrainerParameters(SubParameters):
    """Reinforcement learning of agents that play an interaction protocol."""

    num_iterations: int = Field(default=100, ge=1)
    """Iterations: collect frames_per_batch frames, then learn from them."""
    num_test_iterations: int = Field(default=10, ge=1)
    """Batches of the test loop. Larger measures more exactly."""
    frames_per_batch: Annotated[int, where("rollouts_per_iteration", None)] = Field(
        default=2048, ge=1
    )
    """Frames of an iteration: environments times steps_per_env_per_iteration."""
    rollouts_per_iteration: int | None = Field(default=None, ge=1)
    """Environments that play side by side, in place of frames_per_batch: an iteration has this
    times steps_per_env_per_iteration frames. Null leaves it to frames_per_batch."""
    steps_per_env_per_iteration: int | None = Field(default=None, ge=1)
    """Rounds that each environment plays an iteration; null takes the protocol's longest
    conversation. Smaller plays more environments, with more conversations cut by the batch."""
    num_epochs: int = Field(default=4, ge=1)
    """Passes over an iteration's frames. Larger reuses them more, further off policy."""
    minibatch_size: int = Field(default=256, ge=1)
    """Frames of one optimizer step. A last, smaller minibatch of an epoch is stepped too."""
    lr: float = Field(default=3e-4, gt=0, le=MAX_LR)
    """Learning rate (Adam). Larger learns faster and may diverge."""
    anneal_lr: bool = False
    """Whether the learning rate falls linearly to 0 over the iterations."""
    max_grad_norm: float | None = Field(default=0.5, gt=0)
    """Gradients are scaled down to this norm; null leaves them as they are."""
    grad_clipping: Annotated[Literal["per_agent", "joint"], where_given("max_grad_norm")] = (
        "per_agent"
    )
    """Whether the norm is that of each agent's gradient, or of those of all agents that learn."""
    gamma: float = Field(default=0.95, ge=0, le=1)
    """Discount per round. Smaller cares less for later rewards."""
    lmbda: float = Field(default=0.95, ge=0, le=1)
    """Decay of generalised advantage estimation. Larger has less bias and more variance."""
    loss_critic_type: LossCriticType = "smooth_l1"
    """Distance between value and value target."""
    clip_value: float | None = Field(default=None, gt=0)
    """Furthest that a value moves from that at collection without a charge; null for no bound."""
    use_shared_body: bool = False
    """Whether policy and value function of an agent share one body, which then runs once."""
    normalize_observations: bool = False
    """Whether message histories are shifted and scaled to mean 0 and deviation 1, measured on
    random play before training."""
    num_normalization_steps: Annotated[int, where("normalize_observations", True)] = Field(
        default=1000, ge=2
    )
    """Environment frames of that random play."""
    pretrain_agents: bool = False
    """Whether bodies are first trained to tell the label alone, by the solo_agent section."""
    pretrain_decisions: Annotated[bool, where("pretrain_agents", True)] = True
    """Whether a verifier with a pretrained body decides at first as it tells alone, where its
    policy head can. It then believes nothing that looks wrong to it: a prover that must convince
    learns sooner, one that only wants to be understood may never be heard."""


class CommonPpoParameters(SubParameters):
    """Proximal policy optimisation of agents that play an interaction protocol."""

    loss_type: Literal["clip", "kl_penalty"] = "clip"
    """Clipped ratios (arXiv:1707.06347, eq. 7), or a penalty on the divergence (eq. 8)."""
    loss: Annotated[PlainText, where("loss_type", "clip")] = "ppo"
    """Policy loss, see `rl_objectives.policy_losses`, or one registered by a plug-in."""
    loss_options: Annotated[dict[str, JsonValue], where("loss_type", "clip")] = {}
    """Options of the loss beside its clip, by name."""
    clip_low: float = Field(default=0.2, gt=0)
    """How far a ratio may move below 1 with a gain. Larger takes larger steps."""
    clip_high: float = Field(default=0.2, gt=0)
    """How far a ratio may move above 1 with a gain. Larger takes larger steps."""
    kl_target: Annotated[float, where("loss_type", "kl_penalty")] = Field(default=0.01, gt=0)
    """Divergence, in nats, that the penalty aims at."""
    kl_beta: Annotated[float, where("loss_type", "kl_penalty")] = Field(default=1.0, ge=0)
    """Initial weight of the penalty."""
    kl_decrement: Annotated[float, where("loss_type", "kl_penalty")] = Field(
        default=0.5, gt=0, lt=1
    )
    """Factor of the weight when the divergence is below the target by 1.5 times or more."""
    kl_increment: Annotated[float, where("loss_type", "kl_penalty")] = Field(default=2.0, gt=1)
    """Factor of the weight when the divergence is above the target by 1.5 times or more."""
    critic_coef: float = Field(default=1.0, ge=0)
    """Weight of the value loss. It matters where policy and value function share a body."""
    entropy_weight: float = Field(default=0.001, ge=0)
    """Weight of the entropy bonus. Larger explores more."""
    normalize_advantage: bool = True
    """Whether each agent's advantages are shifted and scaled to mean 0 and deviation 1 in each
    minibatch, over the frames in which it acts."""
