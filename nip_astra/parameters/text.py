"""Parameters of trainers whose agents are chat models."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from nip_astra.parameters.conditions import where, where_above
from nip_astra.parameters.parameters_base import SubParameters

TestScheme = Literal["none", "all", "last", "first_and_last"]
"""Iterations in which agents are tested."""


class TextRlParameters(SubParameters):
    """Training of chat models that play an interaction protocol, by fine-tuning jobs."""

    num_iterations: int = Field(default=4, ge=1)
    """Iterations: play rollouts, then train by jobs on what they hold. The last one plays and
    trains nothing, so there is one round of jobs less."""
    rollouts_per_iteration: int = Field(default=64, ge=1)
    """Datapoints that an iteration plays about, in the order of a shuffled pass over the data.
    Larger has more to choose from and costs more."""
    test_scheme: TestScheme = "first_and_last"
    """Iterations in which agents are tested, before they are trained further. With none, results
    rest on the data that is trained on."""
    test_on_whole_dataset: Annotated[
        bool, where("test_scheme", "all", "last", "first_and_last")
    ] = True
    """Whether a test plays about every datapoint of the test data once, or about as many as an
    iteration plays."""
    verifier_guess_replacement_proportion: float = Field(default=0.0, ge=0, le=1)
    """Share of the rollouts in which, for training, the verifier's last message is replaced by the
    right decision. Larger leans more on the labels, and less on what the verifier found out."""
    verifier_guess_replacement_annealing: Annotated[
        Literal["none", "linear", "exponential"],
        where_above("verifier_guess_replacement_proportion", 0),
    ] = "none"
    """How that share p falls over iterations i at a rate r: linear is max(p - i r, 0), exponential
    p (1 - r)^i."""
    verifier_guess_replacement_annealing_rate: Annotated[
        float, where("verifier_guess_replacement_annealing", "linear", "exponential")
    ] = Field(default=0.1, ge=0, le=1)
    """The rate r. Larger falls faster."""
    num_fine_tune_epochs: int | None = Field(default=None, ge=1)
    """Passes of a job over its examples; null leaves it to the service."""
    fine_tune_minibatch_size: int | None = Field(default=None, ge=1)
    """Examples of an optimizer step of a job; null leaves it to the service."""
    fine_tune_lr_multiplier: float | None = Field(default=None, gt=0)
    """Multiple of the service's learning rate; null leaves it to the service."""
    fine_tune_nll_weight: float | None = Field(default=None, ge=0, le=1000)
    """Weight of the preferred answers' cross entropy in a DPO job; null leaves it to the service.
    Larger keeps preferred answers likelier. Like the three fields below, it is an option of jobs in
    this process and of `nip-astra serve`; other services refuse it."""
    fine_tune_freeze_embeddings: bool | None = None
    """Whether a job that trains all weights leaves token embeddings and output head as they are;
    null leaves it to the service."""
    fine_tune_lr_schedule: Literal["linear", "constant"] | None = None
    """Learning rate over a job: to zero in a line, or constant; null leaves it to the service."""
    fine_tune_truncate_prompts: bool | None = None
    """Whether a prompt longer than the model's window loses its first tokens, rather than the job
    being refused; null leaves it to the service."""
    min_fine_tune_examples: int = Field(default=10, ge=1)
    """Fewest examples of a job; with fewer, the models stay as they are. Services refuse fewer
    than ten."""


def guess_replacement_proportion(parameters: TextRlParameters, iteration: int) -> float:
    """The share of rollouts whose guess is replaced in an iteration, the first being 0."""
    start = parameters.verifier_guess_replacement_proportion
    rate = parameters.verifier_guess_replacement_annealing_rate
    if parameters.verifier_guess_replacement_annealing == "linear":
        return max(start - iteration * rate, 0.0)
    if parameters.verifier_guess_replacement_annealing == "exponential":
        return float(start * (1.0 - rate) ** iteration)
    return start
