"""Everything that changes the result of an experiment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, create_model, field_validator

from nip_astra import __version__
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.parameters.training import TrainingConfiguration


class HyperParameters(SubParameters):
    """What an experiment is.

    The groups here are shared by all trainers. The parameters of one trainer and of one kind of
    scenario stand in sections of their names, which `with_sections` adds.
    """

    trainer: str
    """Registered name of the trainer."""
    scenario: str
    """Name of a folder in scenarios/, or the path of a folder with a scenario.yaml."""
    seed: int = Field(default=0, ge=0)
    """Root of all randomness; 0 is a seed like any other."""
    training: TrainingConfiguration = TrainingConfiguration()
    """Optimisation."""
    plugins: list[str] = []
    """Python files or modules that are imported first and may register names."""
    custom_trainer_module_path: str | None = None
    """Python file, relative to the parameter file, that holds a trainer class of your own."""
    custom_trainer_class_name: str | None = None
    """Name of that class; it is registered under the name in `trainer`."""
    package_version: str = __version__
    """Version that wrote the file; one that is newer than the installed version is refused."""

    @field_validator("package_version")
    @classmethod
    def _is_not_newer(cls, version: str) -> str:
        if _release(version) > _release(__version__):
            raise ValueError(
                f"was written by nip_astra {version}, newer than the installed {__version__}; "
                "install that version or remove package_version"
            )
        return version

    @classmethod
    def with_sections(cls, sections: Mapping[str, type[SubParameters]]) -> type[HyperParameters]:
        """Give a subclass with a field for each section.

        A section whose fields all have defaults may be left out of a file.
        """
        fields: dict[str, Any] = {}
        for name, section in sections.items():
            is_optional = not any(f.is_required() for f in section.model_fields.values())
            text = (section.__doc__ or name).strip().splitlines()[0]
            options: dict[str, Any] = {"default_factory": section} if is_optional else {}
            fields[name] = (section, Field(description=text, **options))
        return create_model("HyperParameters", __base__=cls, __doc__=cls.__doc__, **fields)


def _release(version: str) -> tuple[int, int]:
    major, minor, *_ = [*version.split("."), "0", "0"]
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)
