"""The model that a student learns from."""

from __future__ import annotations

from pydantic import Field

from nip_astra.errors import ConfigurationError, ModelLoadError
from nip_astra.language_models.base import TokenScorer, as_scorer
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.scenario_base.agents import LanguageModelParameters, load_language_model
from nip_astra.trainers.service_base import ServiceTrainer
from nip_astra.utils.devices import resolve_device


class DistillationParameters(SubParameters):
    """Whom the student learns from, and how far it looks ahead."""

    teacher: LanguageModelParameters | None = None  # type: ignore[valid-type]
    """The teacher's backend and weights, for instance those in the folder `model` of a run; it must
    have the student's tokens, and reads the student's prompts. There is none by default, and
    without one nothing is trained."""
    weight: float = Field(default=1.0, gt=0)
    """Advantage per nat of divergence. With an optimizer that divides by the size of gradients it
    matters beside other terms alone."""
    discount: float = Field(default=0.0, ge=0, le=1)
    """How much the divergence at later tokens counts for earlier ones: 0 is of low variance, 1 has
    the exact gradient of the divergence of whole answers."""


def load_teacher(trainer: ServiceTrainer, parameters: DistillationParameters) -> TokenScorer:
    """The teacher, frozen.

    Raises
    ------
    ConfigurationError
        When none is given.
    ModelLoadError
        When it has other tokens than the student, or does not score tokens.
    """
    if parameters.teacher is None:
        name = trainer.hyper_params.trainer
        raise ConfigurationError(
            f"the trainer {name!r} was asked to distil a teacher on the scenario "
            f"{trainer.hyper_params.scenario!r}, but no teacher is given. Set "
            f"{name}.distillation.teacher to a model with the student's tokenizer, for instance "
            "{_type: huggingface, model: runs/RUN/model}."
        )
    loaded = load_language_model(
        parameters.teacher,
        device=resolve_device(trainer.settings.device),
        scenario_dir=trainer.scenario_instance.scenario_dir,
        trainable=False,
    )
    teacher = as_scorer(loaded, role="teacher", to="score what the student says")
    mine, theirs = trainer.policy.tokenizer.get_vocab(), teacher.tokenizer.get_vocab()
    if mine != theirs:
        other = len(set(mine.items()) ^ set(theirs.items()))
        raise ModelLoadError(
            "a student was to learn from the teacher "
            f"{getattr(parameters.teacher, 'model', '')!r}, but {other} tokens are not the same in "
            "both, so that the teacher cannot score what the student says. Choose a teacher with "
            "the student's tokenizer."
        )
    return teacher
