"""Attackers that are files: lists of probes, and chat models with a prompt."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from nip_astra.errors import ConfigurationError, DataError
from nip_astra.evaluation.storage import text_hash
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.services.retrying import open_chat_model
from nip_astra.rollouts.prompts import Prompt, columns_of
from nip_astra.scenario_base.chat_agent import ChatAgent
from nip_astra.scenario_base.conversation.prompts import read_prompts
from nip_astra.scenario_base.text_attackers import (
    ChatAttacker,
    ChatAttackerParameters,
    FixedProbes,
    TextAttacker,
)

_PROBES = (".csv", ".tsv", ".jsonl", ".json", ".txt")
_CHAT = (".yaml", ".yml")
_DATASET = re.compile(r"[\w.-]+/[\w.-]+:[^/]+")


class LoadedTexts(NamedTuple):
    """An attacker of texts.

    Attributes
    ----------
    description : dict
        What the evaluation's configuration says of it.
    card : Any
        Parameters of the model that attacks; None for fixed probes.
    """

    attacker: TextAttacker
    description: dict[str, Any]
    card: Any


def is_text_attacker(spec: str) -> bool:
    """Say whether an attacker is a file, or a data set with its split, and no model of ours."""
    path = Path(spec)
    if path.is_dir():
        return False
    return path.suffix in (*_PROBES, *_CHAT) or _DATASET.fullmatch(spec) is not None


def place_of(spec: str) -> Path:
    """The folder in which evaluations of such an attacker are kept: beside its file."""
    is_file = Path(spec).suffix in (*_PROBES, *_CHAT)
    return Path(spec).with_suffix("") if is_file else Path(re.sub(r"[^\w.-]", "_", spec))


def load_texts(
    spec: str, column: str, settings: ExperimentSettings, scenario_dir: Path | None
) -> LoadedTexts:
    """Load fixed probes, or a chat model that attacks.

    Parameters
    ----------
    column : str
        That holds the probes.

    Raises
    ------
    DataError
        When the file cannot be read, or holds neither.
    """
    if Path(spec).suffix not in _CHAT:
        probes = read_prompts(spec, None, column)
        rows = [f"{probe}\t{columns_of(probe)}" for probe in probes]
        described = {"probes": {"number": len(probes), "sha256": text_hash(rows)}}
        return LoadedTexts(FixedProbes(probes), described, None)
    try:
        values = yaml.safe_load(Path(spec).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise DataError(
            f"an attacker was to be read from {spec}, but: {error}. Give a YAML file with "
            "chat_model and system_prompt."
        ) from error
    if not isinstance(values, dict):
        raise DataError(
            f"an attacker was to be read from {spec}, but it holds no parameters. Give chat_model "
            "and system_prompt."
        )
    parameters = ChatAttackerParameters.from_dict(values)
    agent = ChatAgent(
        "attacker",
        open_chat_model(
            parameters.chat_model, settings, scenario_dir=scenario_dir, label="attacker"
        ),
        max_tokens=parameters.max_new_tokens,
        temperature=parameters.temperature,
        system_prompt=parameters.system_prompt,
    )
    return LoadedTexts(ChatAttacker(agent), parameters.to_dict(), parameters.chat_model)


def openings_of(attacker: TextAttacker, openings: Sequence[str]) -> Sequence[str]:
    """The opening prompts of an attacker's episodes; with fixed probes, what their rows say too."""
    if not isinstance(attacker, FixedProbes):
        return openings
    return [
        Prompt(
            openings[number % len(openings)],
            (*columns_of(openings[number % len(openings)]), *columns_of(probe)),
        )
        for number, probe in enumerate(attacker.probes)
    ]


def num_turns_of(attacker: TextAttacker | None, asked: int | None, own: int) -> int:
    """Turns of an episode; fixed probes have one.

    Raises
    ------
    ConfigurationError
        When more are asked of fixed probes.
    """
    if not isinstance(attacker, FixedProbes):
        return asked or own
    if asked not in (None, 1):
        raise ConfigurationError(
            f"conversations of {asked} turns were asked for, but fixed probes are one turn each. "
            "Leave out --num-turns, or give an attacker that answers."
        )
    return 1
