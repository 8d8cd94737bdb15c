"""Parameters shared by several trainers of interaction protocols.

Parameters of a single trainer are in its nested class `Parameters`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, model_validator

from nip_astra.parameters.conditions import where, where_above, where_given
from nip_astra.parameters.parameters_base import (
    MAX_LR,
    ComponentRegistry,
    PlainText,
    PolymorphicParameters,
    SubParameters,
    polymorphic,
)

LossCriticType = Literal["l1", "l2", "smooth_l1"]
"""Distances between values and targets."""


class RlTrainerParameters(SubParameters):
    """Reinforcement learning of agents that play an interaction protocol."""

    num_iterations: int = Field(default=100, ge=1)
    """Iterations: collect frames_per_batch frames, then learn from them."""
    num_test_iterations: int = Field(default=10, ge=1)
    """Number of test batches. Larger measures more precisely."""
    frames_per_batch: Annotated[int, where("rollouts_per_iteration", None)] = Field(
        default=2048, ge=1
    )
    """Frames per iteration: number of environments times steps_per_env_per_iteration."""
    rollouts_per_iteration: int | None = Field(default=None, ge=1)
    """Number of parallel environments, as an alternative to frames_per_batch: an iteration has this
    times steps_per_env_per_iteration frames. Null uses frames_per_batch."""
    steps_per_env_per_iteration: int | None = Field(default=None, ge=1)
    """Rounds per environment and iteration; null takes the protocol's longest conversation. Smaller
    uses more environments, and truncates more conversations."""
    num_epochs: int = Field(default=4, ge=1)
    """Passes over an iteration's frames. Larger reuses them more, further off policy."""
    minibatch_size: int = Field(default=256, ge=1)
    """Frames of one optimizer step. A last, smaller minibatch of an epoch is stepped too."""
    lr: float = Field(default=3e-4, gt=0, le=MAX_LR)
    """Learning rate (Adam). Larger learns faster and may diverge."""
    anneal_lr: bool = False
    """Whether the learning rate falls linearly to 0 over the iterations."""
    max_grad_norm: float | None = Field(default=0.5, gt=0)
    """Maximum gradient norm, by clipping; null does not clip."""
    grad_clipping: Annotated[Literal["per_agent", "joint"], where_given("max_grad_norm")] = (
        "per_agent"
    )
    """Whether the norm is per agent, or of all learning agents jointly."""
    gamma: float = Field(default=0.95, ge=0, le=1)
    """Discount per round. Smaller weights later rewards less."""
    lmbda: float = Field(default=0.95, ge=0, le=1)
    """Decay of generalised advantage estimation. Larger has less bias and more variance."""
    loss_critic_type: LossCriticType = "smooth_l1"
    """Distance between value and value target."""
    clip_value: float | None = Field(default=None, gt=0)
    """Clip range of the value loss about the value at collection; null does not clip."""
    use_shared_body: bool = False
    """Whether policy and value function of an agent share one body, computed once."""
    normalize_observations: bool = False
    """Whether message histories are normalised to mean 0 and deviation 1, measured on random play
    before training."""
    num_normalization_steps: Annotated[int, where("normalize_observations", True)] = Field(
        default=1000, ge=2
    )
    """Environment frames of random play for the normalisation."""
    pretrain_agents: bool = False
    """Whether bodies are pretrained to predict the label alone, with the solo_agent section."""
    pretrain_decisions: Annotated[bool, where("pretrain_agents", True)] = True
    """Whether a verifier with a pretrained body initially decides by its solo prediction, if its
    policy head allows it. Provers that must persuade learn faster; in cooperative tasks the
    verifier may never learn to use messages."""


class CommonPpoParameters(SubParameters):
    """Proximal policy optimisation of agents that play an interaction protocol."""

    loss_type: Literal["clip", "kl_penalty"] = "clip"
    """Clipped ratios (arXiv:1707.06347, eq. 7), or a penalty on the divergence (eq. 8)."""
    loss: Annotated[PlainText, where("loss_type", "clip")] = "ppo"
    """Policy loss, see `rl_objectives.policy_losses`, or one registered by a plug-in."""
    loss_options: Annotated[dict[str, JsonValue], where("loss_type", "clip")] = {}
    """Options of the loss other than its clip range, by name."""
    clip_low: float = Field(default=0.2, gt=0)
    """How far a ratio may move below 1 with a gain. Larger takes larger steps."""
    clip_high: float = Field(default=0.2, gt=0)
    """How far a ratio may move above 1 with a gain. Larger takes larger steps."""
    kl_target: Annotated[float, where("loss_type", "kl_penalty")] = Field(default=0.01, gt=0)
    """Target divergence, in nats."""
    kl_beta: Annotated[float, where("loss_type", "kl_penalty")] = Field(default=1.0, ge=0)
    """Initial weight of the penalty."""
    kl_decrement: Annotated[float, where("loss_type", "kl_penalty")] = Field(
        default=0.5, gt=0, lt=1
    )
    """Factor of the weight if the divergence is below the target by a factor of 1.5 or more."""
    kl_increment: Annotated[float, where("loss_type", "kl_penalty")] = Field(default=2.0, gt=1)
    """Factor of the weight if the divergence is above the target by a factor of 1.5 or more."""
    critic_coef: float = Field(default=1.0, ge=0)
    """Weight of the value loss. It matters if policy and value function share a body."""
    entropy_weight: float = Field(default=0.001, ge=0)
    """Weight of the entropy bonus. Larger explores more."""
    normalize_advantage: bool = True
    """Whether each agent's advantages are normalised to mean 0 and deviation 1 in each minibatch,
    over the frames in which it acts (spg: over all frames, since others' moves count too)."""


TestScheme = Literal["none", "all", "last", "first_and_last"]
"""Iterations in which agents are tested."""


class TextRlParameters(SubParameters):
    """Training of chat models that play an interaction protocol, by fine-tuning jobs."""

    num_iterations: int = Field(default=4, ge=1)
    """Iterations: collect rollouts, then run fine-tuning jobs on them. The last iteration only
    collects, so there is one round of jobs less."""
    rollouts_per_iteration: int = Field(default=64, ge=1)
    """Number of rollouts per iteration, approximately, in the order of a shuffled pass over the
    data. Larger gives more examples to select from and costs more."""
    test_scheme: TestScheme = "first_and_last"
    """Iterations in which agents are tested, before further training. With none, results are
    measured on the training data."""
    test_on_whole_dataset: Annotated[
        bool, where("test_scheme", "all", "last", "first_and_last")
    ] = True
    """Whether a test covers the whole test set once, or as many datapoints as an iteration."""
    verifier_guess_replacement_proportion: float = Field(default=0.0, ge=0, le=1)
    """Share of training rollouts in which the verifier's last message is replaced by the correct
    decision. Larger relies more on the labels, and less on the verifier's own decisions."""
    verifier_guess_replacement_annealing: Annotated[
        Literal["none", "linear", "exponential"],
        where_above("verifier_guess_replacement_proportion", 0),
    ] = "none"
    """Annealing of that share p over iterations i at a rate r: linear is max(p - i r, 0),
    exponential p (1 - r)^i."""
    verifier_guess_replacement_annealing_rate: Annotated[
        float, where("verifier_guess_replacement_annealing", "linear", "exponential")
    ] = Field(default=0.1, ge=0, le=1)
    """The rate r. Larger anneals faster."""
    num_fine_tune_epochs: int | None = Field(default=None, ge=1)
    """Passes of a job over its examples; null uses the service's default."""
    fine_tune_minibatch_size: int | None = Field(default=None, ge=1)
    """Examples per optimizer step of a job; null uses the service's default."""
    fine_tune_lr_multiplier: float | None = Field(default=None, gt=0)
    """Multiple of the service's learning rate; null uses the service's default."""
    fine_tune_nll_weight: float | None = Field(default=None, ge=0, le=1000)
    """Weight of the preferred answers' cross entropy in a DPO job; null uses the service's default.
    Larger keeps preferred answers likelier. This and the next four fields are options of jobs in
    this process and of `nip-astra serve`; other services refuse them."""
    fine_tune_freeze_embeddings: bool | None = None
    """Whether a job that trains all weights freezes token embeddings and output head; null uses the
    service's default."""
    fine_tune_lr_schedule: Literal["linear", "constant"] | None = None
    """Learning rate of a job: linear to 0, or constant; null uses the service's default."""
    fine_tune_truncate_prompts: bool | None = None
    """Whether a prompt longer than the model's window is truncated from the left, instead of
    refusing the job; null uses the service's default."""
    fine_tune_trained_weights: Literal["adapter", "all"] | None = None
    """What a job trains: a low-rank adapter of the model, of the size in the model's `lora`, or all
    of its weights; null uses the service's default, an adapter."""
    min_fine_tune_examples: int = Field(default=10, ge=1)
    """Minimum number of examples of a job; with fewer, the models are not trained. Services refuse
    fewer than ten."""


def guess_replacement_proportion(parameters: TextRlParameters, iteration: int) -> float:
    """Return the share of rollouts with a replaced decision in an iteration, counted from 0."""
    start = parameters.verifier_guess_replacement_proportion
    rate = parameters.verifier_guess_replacement_annealing_rate
    if parameters.verifier_guess_replacement_annealing == "linear":
        return max(start - iteration * rate, 0.0)
    if parameters.verifier_guess_replacement_annealing == "exponential":
        return float(start * (1.0 - rate) ** iteration)
    return start


class CommonProtocolParameters(SubParameters):
    """Rewards and turn order shared by all interaction protocols."""

    prover_reward: Annotated[float, where("shared_reward", False)] = 1.0
    """Reward of a prover that the verifier's decision favours."""
    verifier_reward: float = 1.0
    """Reward of the verifier for a correct decision."""
    verifier_incorrect_penalty: float = -1.0
    """Reward of the verifier for a wrong decision. Lower makes it decide more carefully."""
    verifier_terminated_penalty: float = -1.0
    """Reward of the verifier if the conversation ends without a decision."""
    verifier_no_guess_reward: float = 0.0
    """Reward of the verifier for a turn without a decision. Larger makes conversations longer."""
    shared_reward: bool = False
    """Whether provers get the verifier's reward instead of their own: a cooperative game."""
    force_guess: Literal["zero", "one", "y"] | None = None
    """Decision that replaces the verifier's, in its first turn that may decide: always 0, always 1,
    or the true label; null lets the verifier decide."""
    verifier_first: bool = True
    """Whether the verifier has the first turn, if the protocol leaves that open."""
    zero_knowledge: bool = False
    """Whether the protocol is wrapped so that provers are also rewarded for revealing nothing."""


class ZkProtocolParameters(SubParameters):
    """The zero-knowledge wrapper; read if protocol_common.zero_knowledge is true."""

    simulator_reward_coefficient: float = Field(default=1.0, ge=0)
    """Weight, in both rewards, of the similarity of simulator and adversarial verifier."""
    aux_prover_reward_coefficient: float = Field(default=1.0, ge=0)
    """Weight of that similarity in the provers' rewards. Larger reveals less."""


class BaseRunParameters(SubParameters):
    """A finished run that this one builds on."""

    base_run_type: Literal["none", "parameters", "rerun_tests"] = "none"
    """none: no base run. parameters: its parameters are the defaults of this run. rerun_tests:
    also, its trained agents are tested again and nothing is trained."""
    run: str | None = None
    """The base run: a run directory, or wandb://entity/project/run_id."""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.base_run_type == "none" and self.run is not None:
            raise ValueError(
                "names a run without base_run_type; set it to parameters or rerun_tests"
            )
        if self.base_run_type != "none" and self.run is None:
            raise ValueError("needs a run to take weights or parameters from; give run")
        return self


MESSAGE_REGRESSORS: ComponentRegistry[Any] = ComponentRegistry("message_regressor")
"""Regressor types; `nip_astra.message_regressors.base` has the decorator."""


class MessageRegressorParameters(PolymorphicParameters):
    """Base of the parameters of regressors."""


RegressorField = polymorphic(MESSAGE_REGRESSORS.get, MessageRegressorParameters)


class MessageRegressionParameters(SubParameters):
    """A probe that tests whether provers' messages reveal the label."""

    regressor: RegressorField | None = None  # type: ignore[valid-type]
    """Regressor from message to label, by `_type`, for instance `{_type: mlp}`; null for none."""
    agents: list[PlainText] | None = None
    """Names of the agents whose messages are probed; null probes all agents."""
    reset_on_fit: Annotated[bool, where_given("regressor")] = True
    """Whether each fit starts from scratch. If false, an mlp continues from its last fit on a fixed
    split of datapoints, so its accuracy shows whether the messages' code is stable."""
    period: Annotated[int, where_given("regressor")] = Field(default=1, ge=1)
    """Iterations between fits. Larger is faster."""
    test_share: Annotated[float, where_given("regressor")] = Field(default=0.2, gt=0, lt=1)
    """Share of the datapoints held out to measure accuracy. Larger measures the accuracy more
    precisely, of a fit to less data."""
