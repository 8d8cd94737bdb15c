"""Find the classes that parameters name, and load the code that they come with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nip_astra.errors import ConfigurationError, PluginError, UnknownNameError
from nip_astra.parameters.content import content_root, find_scenario, scenario_names
from nip_astra.parameters.loading import Layer, literal_layer, read_yaml_layers
from nip_astra.plugins import load_plugin, module_of
from nip_astra.scenarios.registry import SCENARIOS, Scenario
from nip_astra.trainers.registry import TRAINERS
from nip_astra.trainers.trainer_base import Trainer
from nip_astra.trust import active_source


def load_plugins(specs: Sequence[str], named: dict[str, Any], folder: Path | None) -> list[str]:
    """Import plug-ins, also those that a file names and that of the scenario."""
    loaded = [*load_all(specs, None), *load_all(plugin_specs(named), folder)]
    if named.get("scenario") is not None:
        # It may register the trainer.
        _load_plugin_of(find_scenario(str(named["scenario"])))
    return loaded


def load_code(named: dict[str, Any], folder: Path | None) -> None:
    """Import all plug-ins that parameters name."""
    load_plugins((), named, folder)
    if named.get("custom_trainer_module_path") is not None:
        load_plugin(str(named["custom_trainer_module_path"]), relative_to=folder)


def load_all(specs: Sequence[str], folder: Path | None) -> list[str]:
    """Import plug-ins, and give what they are known by."""
    return [load_plugin(spec, relative_to=folder).spec for spec in specs]


def plugin_specs(named: dict[str, Any]) -> list[str]:
    """The plug-ins of a file; what is no list of text is told with the other faults later."""
    specs = named.get("plugins")
    is_valid = isinstance(specs, list) and all(isinstance(spec, str) for spec in specs)
    return list(specs) if is_valid and specs else []


def find_trainer(named: dict[str, Any], folder: Path | None) -> tuple[str, type[Trainer]]:
    """The trainer's name and its class, which is registered or named by file."""
    if named.get("trainer") is None:
        raise ConfigurationError(
            f"no trainer was given. Known trainers: {', '.join(TRAINERS.names())}. Choose one, for "
            "instance --trainer ast_dpo."
        )
    name = str(named["trainer"])
    path, class_name = (
        named.get("custom_trainer_module_path"),
        named.get("custom_trainer_class_name"),
    )
    if path is None and class_name is None:
        return name, TRAINERS.get(name)
    if path is None or class_name is None:
        raise ConfigurationError(
            "a custom trainer needs both custom_trainer_module_path and "
            "custom_trainer_class_name. Give both, or neither."
        )
    module = module_of(load_plugin(str(path), relative_to=folder))
    found = getattr(module, str(class_name), None)
    if not (isinstance(found, type) and issubclass(found, Trainer)):
        raise PluginError(
            f"custom_trainer_class_name {class_name!r} was asked for, but {path} holds no Trainer "
            "of that name. Give the name of a subclass of nip_astra's Trainer."
        )
    return name, found


def find_kind(kind: str, scenario_dir: Path) -> type[Scenario]:
    """The class that builds scenarios of a kind."""
    if kind not in SCENARIOS.names():
        raise UnknownNameError(
            "scenario kind",
            kind,
            SCENARIOS.names(),
            f"It stands in {scenario_dir / 'scenario.yaml'}; a plugin.py beside that file may "
            "register a kind of your own.",
        )
    return SCENARIOS.get(kind)


def check_that_it_trains_on(
    trainer: str, trainer_class: type[Trainer], scenario: str, kind: str
) -> None:
    """Refuse a scenario of a kind that the trainer cannot train on.

    Raises
    ------
    ConfigurationError
        Naming the kinds that it can, and those of their scenarios that ship.
    UnknownNameError
        When no kind builds anything for the trainer's type.
    """
    trainer_type = trainer_class.trainer_type
    kinds = list(trainer_class.scenario_kinds) or [
        name for name in SCENARIOS.names() if trainer_type in SCENARIOS.get(name).trainer_types
    ]
    if kind in kinds or not kinds:
        SCENARIOS.get(kind).check_trainer_type(trainer_type)
        return
    if not trainer_class.scenario_kinds:
        # What names no kinds plays a protocol.
        kinds = [name for name in kinds if SCENARIOS.get(name).uses_protocol] or kinds
    shipped = [name for name in scenario_names() if read_scenario(find_scenario(name))[1] in kinds]
    raise ConfigurationError(
        f"the trainer {trainer!r} was asked to train on the scenario {scenario!r} of kind "
        f"{kind!r}, but it trains on {', '.join(kinds)} only. Choose another --scenario"
        + (f" ({', '.join(shipped)})" if shipped else "")
        + " or another --trainer."
    )


def _load_plugin_of(scenario_dir: Path) -> None:
    plugin = scenario_dir / "plugin.py"
    if plugin.is_file():
        load_plugin(plugin)


def read_scenario(scenario_dir: Path) -> tuple[list[Layer], str]:
    """The scenario's layers and its kind; its plugin.py is loaded first."""
    _load_plugin_of(scenario_dir)
    path = scenario_dir / "scenario.yaml"
    layers = read_yaml_layers(path, source="scenario.yaml")
    source = active_source()
    is_shipped = scenario_dir.parent == content_root() / "scenarios"
    if source is not None and not source.is_trusted and not is_shipped:
        layers = [literal_layer(layer.source, layer.values) for layer in layers]
    kinds = [layer.values.pop("kind", None) for layer in layers]
    kind = next((kind for kind in reversed(kinds) if kind is not None), None)
    if kind is None:
        raise ConfigurationError(
            f"{path} says no kind. Add `kind:` with one of: {', '.join(SCENARIOS.names())}."
        )
    return layers, str(kind)
