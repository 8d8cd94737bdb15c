"""The scorers that a command asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from nip_astra.errors import DataError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.scorers.base import SCORERS, Scorer, build_scorer
from nip_astra.trust import active_source, on_behalf_of
from nip_astra.utils.devices import resolve_device


@dataclass(frozen=True)
class LoadedScorers:
    """Scorers by name, the one that decides first, and their parameters."""

    scorers: dict[str, Scorer]
    parameters: dict[str, Any]


def load_scorers(
    specs: Sequence[str],
    own: Any,
    settings: ExperimentSettings,
    scenario_dir: Path | None,
    own_scorer: Scorer | None = None,
) -> LoadedScorers:
    """The scorers asked for; without any, the scenario's own.

    Parameters
    ----------
    specs : Sequence[str]
        A registered name, `own` for the scenario's, or a YAML file of a scorer's parameters.
    own : Any
        Parameters of the scenario's scorer.
    """
    scorers: dict[str, Scorer] = {}
    found: dict[str, Any] = {}
    for spec in specs or ("own",):
        name, parameters = _scorer_parameters(spec, own)
        while name in scorers:
            name += "_2"
        # Any but the run's own was named by the user.
        with on_behalf_of(active_source() if spec == "own" else None):
            is_built = spec == "own" and own_scorer is not None
            scorers[name] = (
                own_scorer
                if is_built and own_scorer is not None
                else build_scorer(
                    parameters, device=resolve_device(settings.device), scenario_dir=scenario_dir
                )
            )
        found[name] = parameters.to_dict()
    return LoadedScorers(scorers, found)


def _scorer_parameters(spec: str, own: Any) -> tuple[str, Any]:
    if spec == "own":
        return str(own.type_name), own
    path = Path(spec)
    if path.suffix not in (".yaml", ".yml"):
        return spec, SCORERS.get(spec).Parameters.from_dict({})
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise DataError(
            f"a scorer was to be read from {path}, but: {error}. Give a YAML file with _type and "
            "the scorer's parameters."
        ) from error
    if not isinstance(values, dict) or not isinstance(values.get("_type"), str):
        raise DataError(
            f"a scorer was to be read from {path}, but it has no _type. Begin it with `_type: "
            f"<name>`, one of: {', '.join(SCORERS.names())}."
        )
    rest = {name: value for name, value in values.items() if name != "_type"}
    return path.stem, SCORERS.get(values["_type"]).Parameters.from_dict(rest)
