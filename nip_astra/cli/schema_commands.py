"""What the command `schema` does; imported when it runs."""

from __future__ import annotations

from typing import Any

from nip_astra.cli.terminal import say
from nip_astra.parameters.content import scenario_names
from nip_astra.parameters.file_schema import schema_of_files
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.plugins import load_plugin
from nip_astra.protocols.registry import PROTOCOL_HANDLERS
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.safe_text import to_json
from nip_astra.scenarios.registry import SCENARIOS
from nip_astra.trainers.registry import TRAINERS


def schema(experiment: dict[str, Any]) -> None:
    """Print the JSON Schema of all parameter files, or of those of a trainer and scenario."""
    is_open = experiment["trainer"] is None and experiment["scenario"] is None
    if is_open:
        for spec in experiment["plugins"]:
            load_plugin(spec)
        model = HyperParameters.with_sections(_every_section())
    else:
        model = type(resolve_experiment(**experiment).hyper_params)
    known = {
        "trainer": TRAINERS.names(),
        "scenario": scenario_names(),
        "interaction_protocol": PROTOCOL_HANDLERS.names(),
    }
    printed = schema_of_files(model, known, is_open=is_open)
    say(to_json(printed, indent=1))


def _every_section() -> dict[str, type[SubParameters]]:
    """The sections of every trainer, kind of scenario and protocol that has a name."""
    sections: dict[str, type[SubParameters]] = {}
    for registry in (PROTOCOL_HANDLERS, SCENARIOS, TRAINERS):
        sections |= {name: registry.get(name).Parameters for name in registry.names()}
    return sections
