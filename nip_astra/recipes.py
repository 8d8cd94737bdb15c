"""Runs without a parameter file: tasks by TRL's conventions, and stress tests of a target."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nip_astra.errors import ConfigurationError, DataError, UnknownNameError, counted
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.parameters.content import HUB, content_root
from nip_astra.parameters.files import read_yaml_mapping
from nip_astra.parameters.parameters_base import TRL_OPTIONS
from nip_astra.plugins import load_plugin
from nip_astra.rl_objectives.policy_losses import GROUP_VARIANTS
from nip_astra.scenario_base.conversation.prompts import DEFAULT_COLUMN
from nip_astra.scenario_base.tasks.rewards import REWARDS
from nip_astra.scorers.base import SCORERS
from nip_astra.tracking.run_directory import write_atomically
from nip_astra.tracking.run_lock import run_lock
from nip_astra.trl_options import TRAINER, map_trl_options

if TYPE_CHECKING:
    from nip_astra.run import ExperimentResult

SCENARIO = "dataset"
POCKET_ATTACKER = "scenario://pocket_chat/models/attacker"
Reward = str | Path | Mapping[str, Any] | Callable[..., Any]
"""A reward: `file.py:function`, `package.module:function`, the name of a registered reward or
scorer, a YAML file or mapping with the parameters of a scorer, or a function."""
Target = str | Path | Mapping[str, Any] | Callable[..., Any]
"""The target of a stress test: a saved model, `.gguf` file or hub id; the address of a service with
OpenAI's API; `file.py:function` or `package.module:function` or a function, called as
`chat_models.python` describes; or a YAML file or mapping with the parameters of a chat model."""
FUNCTION = re.compile(r".+\.py:[A-Za-z_][\w.]*|[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
"""A reference to a function."""


@dataclass(frozen=True)
class TaskParameters:
    """Parameters of a task.

    Attributes
    ----------
    values : dict
        A parameter file's content.
    mapped : dict
        Our parameters and their values for each option that was given by TRL's name.
    """

    values: dict[str, Any]
    mapped: dict[str, dict[str, Any]]


def train_task(
    *,
    model: str | Path,
    data: Any,
    rewards: Reward | Sequence[Reward],
    weights: Sequence[float] | None = None,
    test_data: Any = None,
    column: str = DEFAULT_COLUMN,
    algorithm: str = "grpo",
    overrides: Iterable[str] | Mapping[str, Any] = (),
    seed: int | None = None,
    plugins: Sequence[str] = (),
    **options: Any,
) -> ExperimentResult:
    """Train a model on a dataset with reward functions (trainer `self_hosted_grpo`).

    Parameters
    ----------
    model : str or Path
        Folder of a saved model, `.gguf` file, or hub id.
    data : str, Path, datasets.Dataset or DatasetDict, pandas.DataFrame, or rows
        Rows with a `prompt`, a text or messages, and any other columns: a file (JSONL, CSV, JSON,
        Parquet), `hub:owner/name:split`, a folder of `save_to_disk`, a dataset, a table, or a
        sequence of mappings. Of several splits, `train` is learned and `test` held out.
    rewards : Reward or sequence of Reward
        Reward functions, called as `trl.GRPOTrainer` calls its own.
    weights : Sequence[float], optional
        Factor of each reward in the sum; 1 by default.
    test_data : optional
        Held-out rows; by default a tenth of the prompts of `data` is held out.
    column : str
        Column of the prompts.
    algorithm : str
        A name in `rl_objectives.policy_losses.GROUP_VARIANTS`: grpo, dr_grpo, dapo, rloo, ...
    overrides : Iterable[str] or Mapping
        Assignments `a.b=c` to any parameter, or values by path.
    **options
        Options by TRL's names (`TRL_OPTIONS`), and settings of the run (`run_id`, `device`, ...).

    Raises
    ------
    ConfigurationError
        For an unknown name, or a value of another type.
    DataError
        For data that cannot be read.
    """
    from nip_astra.resolving.resolution import resolve_experiment
    from nip_astra.run import run_experiment

    load_plugins(plugins)
    trl = {name: options.pop(name) for name in list(options) if name in TRL_OPTIONS}
    runs_dir = Path(options.get("runs_dir") or ExperimentSettings().runs_dir)
    data, given_test = _splits_of(data)
    test_data = given_test if test_data is None else test_data
    task = task_parameters(
        model=model,
        data=_stored(data, runs_dir),
        rewards=rewards,
        weights=weights,
        test_data=None if test_data is None else _stored(test_data, runs_dir),
        column=column,
        algorithm=algorithm,
        options=trl,
    )
    resolved = resolve_experiment(
        hyper_params=task.values, overrides=overrides, seed=seed, plugins=plugins
    )
    return run_experiment(resolved, **options)


def stress_test(
    *,
    target: Target,
    scorer: Reward,
    target_model: str | None = None,
    attacker: str | Path | None = None,
    trainer: str = "ast_dpo",
    overrides: Iterable[str] | Mapping[str, Any] = (),
    seed: int | None = None,
    plugins: Sequence[str] = (),
    **settings: Any,
) -> ExperimentResult:
    """Train an attacker to elicit failures of a target, as rated by a scorer.

    Parameters
    ----------
    target : Target
        A saved model, `.gguf` file or hub id; or a chat model, see `Target`.
    scorer : Reward
        What rates the target's responses, 0 to 1; see `Reward`.
    target_model : str, optional
        Name of the model at the address.
    attacker : str or Path, optional
        The attacker before training. By default, that of the scenario pocket_chat if the target
        knows no more words than it, else SmolLM2-135M-Instruct with a LoRA adapter.
    trainer : str
        A trainer of stress tests.
    overrides : Iterable[str] or Mapping
        Assignments `a.b=c` to any parameter, or values by path.
    **settings
        Settings of the run (`run_id`, `device`, ...).

    Raises
    ------
    ConfigurationError
        For an unknown name, or a value of another type.
    ModelLoadError
        For a model that cannot be loaded.
    """
    from nip_astra.resolving.resolution import resolve_experiment
    from nip_astra.run import run_experiment

    load_plugins(plugins)
    values = stress_parameters(
        target=target,
        scorer=scorer,
        target_model=target_model,
        attacker=attacker,
        trainer=trainer,
    )
    resolved = resolve_experiment(
        hyper_params=values, overrides=overrides, seed=seed, plugins=plugins
    )
    return run_experiment(resolved, **settings)


def stress_parameters(
    *,
    target: Target,
    scorer: Reward,
    target_model: str | None = None,
    attacker: str | Path | None = None,
    trainer: str = "ast_dpo",
) -> dict[str, Any]:
    """Return the parameters of `stress_test`, as in a parameter file."""
    chat_model = _chat_model(target, target_model)
    model = target if chat_model is None and isinstance(target, str | Path) else None
    known = attacker if attacker is not None else model
    is_small = known is not None and len(_tokenizer(known)) <= len(_tokenizer(POCKET_ATTACKER))
    family = "pocket_chat" if is_small else "smollm2_chat"
    speakers: dict[str, Any] = {"scorer": _scorer(scorer)}
    speakers["target"] = {"chat_model": chat_model} if model is None else _speaker(model)
    if attacker is not None:
        speakers["attacker"] = _speaker(attacker)
    scenario = {"pocket_chat": "pocket_chat_api", "smollm2_chat": "smollm2_api"}[family]
    return {
        "trainer": trainer,
        "scenario": scenario if model is None else family,
        "ast_chat": speakers,
    }


def _chat_model(target: Target, name: str | None) -> dict[str, Any] | None:
    """Return the parameters of a target that is a chat model; None for a language model."""
    is_address = str(target).startswith(("http://", "https://"))
    if is_address is (name is None):
        raise ConfigurationError(
            f"the target {str(target)!r} is an address, so it needs the name of its model."
            if is_address
            else f"target_model is for addresses only, not for {str(target)!r}."
        )
    if is_address:
        return {"_type": "openai", "base_url": str(target), "model": name}
    if isinstance(target, Mapping):
        return dict(target)
    if callable(target):
        return _function_as_chat_model(target)
    if str(target).endswith((".yaml", ".yml")):
        return read_yaml_mapping(Path(target))
    if FUNCTION.fullmatch(str(target)):
        place, _, function = str(target).rpartition(":")
        return {"_type": "python", "function": f"{_located(place)}:{function}"}
    return None


def _function_as_chat_model(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the parameters of a function as a chat model; one of a script is registered."""
    from nip_astra.language_models.services.chat_models.python import register_function

    reference = _importable_reference(function)
    if reference is not None:
        return {"_type": "python", "function": reference}
    name = _plain_name(function, "target")
    register_function(name, function)
    return {"_type": name}


def _speaker(model: str | Path) -> dict[str, Any]:
    return {
        "language_model": {"_type": "huggingface", "model": _located(model)},
        "format": "chat" if getattr(_tokenizer(model), "chat_template", None) else "plain",
    }


def _scorer(scorer: Reward) -> dict[str, Any]:
    """Return the parameters of a scorer; a function becomes the scorer `python`."""
    parameters = _reward(scorer)[1]
    if "scorer" in parameters:
        return dict(parameters["scorer"])
    reference = parameters["function"]
    if ":" not in reference:
        raise ConfigurationError(
            f"{reference!r} is not a scorer. Give a registered scorer, a YAML file of one, or "
            "file.py:function."
        )
    return {"_type": "python", "function": reference}


def load_plugins(specs: Sequence[str]) -> None:
    """Load plug-ins, so that the names that they register can be given as rewards and scorers."""
    for spec in specs:
        load_plugin(spec)


def task_parameters(
    *,
    model: str | Path,
    data: str | Path,
    rewards: Reward | Sequence[Reward],
    weights: Sequence[float] | None = None,
    test_data: str | Path | None = None,
    column: str = DEFAULT_COLUMN,
    algorithm: str = "grpo",
    options: Mapping[str, Any] | None = None,
) -> TaskParameters:
    """Return the parameters of `train_task`, as in a parameter file."""
    if algorithm not in GROUP_VARIANTS:
        raise UnknownNameError(
            "algorithm",
            algorithm,
            GROUP_VARIANTS,
            f"Set other losses and advantages with --set {TRAINER}.policy_loss.loss=NAME.",
        )
    task: dict[str, Any] = {
        "_type": "dataset",
        "train": _located(data),
        "reward": "functions",
        "functions": named_rewards(rewards, weights),
    }
    if test_data is not None:
        task["test"] = _located(test_data)
    if column != DEFAULT_COLUMN:
        task["column"] = column
    values: dict[str, Any] = {
        "trainer": TRAINER,
        "scenario": SCENARIO,
        "task": {"task": task, "policy": _speaker(model)},
        TRAINER: _variant(algorithm),
    }
    scenario = read_yaml_mapping(content_root() / "scenarios" / SCENARIO / "scenario.yaml")
    mapped = map_trl_options(options or {}, values[TRAINER], scenario["training"])
    for settings in mapped.values():
        for path, value in settings.items():
            _put(values, path, value)
    return TaskParameters(values, {name: mapped[name] for name in mapped if name})


def named_rewards(
    rewards: Reward | Sequence[Reward], weights: Sequence[float] | None = None
) -> dict[str, dict[str, Any]]:
    """Return the parameters of rewards by name.

    Raises
    ------
    ConfigurationError
        Without a reward, or with another number of weights.
    """
    given = [rewards] if isinstance(rewards, str | Path | Mapping) or callable(rewards) else rewards
    if not given:
        raise ConfigurationError("a task needs at least one reward. Give file.py:function.")
    if weights is not None and len(weights) != len(given):
        raise ConfigurationError(
            f"{counted(len(given), 'reward')} cannot have {counted(len(weights), 'weight')}. Give "
            "one weight for each."
        )
    found: dict[str, dict[str, Any]] = {}
    for index, one in enumerate(given):
        name, parameters = _reward(one)
        while name in found:
            name += "_"
        weight = 1.0 if weights is None else float(weights[index])
        found[name] = parameters | ({} if weight == 1.0 else {"weight": weight})
    return found


def _reward(reward: Reward) -> tuple[str, dict[str, Any]]:
    """Return name and parameters of a reward."""
    if isinstance(reward, Mapping):
        return str(reward.get("_type", "scorer")), {"scorer": dict(reward)}
    if isinstance(reward, str | Path):
        return _reward_of_text(str(reward))
    reference = _reference_of(reward)
    return reference.rpartition(":")[2].rpartition(".")[2], {"function": reference}


def _reward_of_text(text: str) -> tuple[str, dict[str, Any]]:
    if text.endswith((".yaml", ".yml")):
        parameters = read_yaml_mapping(Path(text))
        return Path(text).stem, {"scorer": parameters}
    place, found, name = text.rpartition(":")
    if found:
        return name.rpartition(".")[2], {"function": f"{_located(place)}:{name}"}
    if text in REWARDS.names():
        return text, {"function": text}
    if text in SCORERS.names():
        return text, {"scorer": {"_type": text}}
    advice = "Give file.py:function, a YAML file with a scorer, or one of these names."
    raise UnknownNameError("reward", text, [*REWARDS.names(), *SCORERS.names()], advice)


def _reference_of(function: Callable[..., Any]) -> str:
    """Return an importable reference to a function: its module and name, or its registered name.

    A function of a script or notebook is registered, since importing the script would run it.
    """
    reference = _importable_reference(function)
    if reference is not None:
        return reference
    name = _plain_name(function, "reward")
    if name in REWARDS.names():
        REWARDS.forget(name)
    REWARDS.register(name)(function)
    return name


def _importable_reference(function: Callable[..., Any]) -> str | None:
    """Return module and name of a function; None for one of a script or notebook."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    module = getattr(function, "__module__", "__main__")
    if module == "__main__" or not name.replace(".", "").isidentifier():
        return None
    with suppress(ImportError, ValueError):
        if importlib.util.find_spec(module) is not None:
            return f"{module}:{name}"
    source = inspect.getsourcefile(sys.modules[module]) if module in sys.modules else None
    return None if source is None else f"{source}:{name}"


def _plain_name(function: Callable[..., Any], default: str) -> str:
    """Return a function's name with only characters that a registered name may have."""
    name = getattr(function, "__qualname__", type(function).__qualname__).rpartition(".")[2]
    plain = "".join(letter if letter.isalnum() else "_" for letter in name)
    return plain.strip("_") or default


def numbers_of(text: str) -> list[float]:
    """Parse numbers separated by commas."""
    try:
        return [float(one) for one in text.split(",")]
    except ValueError as error:
        raise ConfigurationError(
            f"the weights {text!r} are not numbers. Give one for each reward: 1,0.5."
        ) from error


def _tokenizer(model: str | Path) -> Any:
    from nip_astra.language_models.sources import find_tokenizer

    return find_tokenizer(str(model), None, None)


def _variant(algorithm: str) -> dict[str, Any]:
    """Return the trainer's parameters for a published algorithm."""
    one = GROUP_VARIANTS[algorithm]
    loss: dict[str, Any] = {"loss": one.loss, "reduction": one.reduction}
    if one.clip_high is not None:
        loss["clip_high"] = one.clip_high
    found: dict[str, Any] = {"baseline": one.baseline, "scale": one.scale, "policy_loss": loss}
    if one.zero_variance != "keep":
        found["advantage_options"] = {"zero_variance": one.zero_variance}
    return found


def _located(place: str | Path) -> str:
    """Return a path valid in any working directory; hub ids and modules unchanged."""
    text = str(place)
    if text.startswith(HUB):
        return text
    path = Path(text).expanduser()
    with suppress(OSError, ValueError):
        if path.exists():
            return str(path.resolve())
    return text


def _put(values: dict[str, Any], path: str, value: Any) -> None:
    *groups, name = path.split(".")
    for group in groups:
        values = values.setdefault(group, {})
    if isinstance(value, Mapping):
        values.setdefault(name, {}).update(value)
    else:
        values[name] = value


def _splits_of(data: Any) -> tuple[Any, Any]:
    """Return training and held-out rows; the latter are None unless data has both as splits."""
    if not isinstance(data, Mapping):
        return data, None
    if "train" not in data:
        raise DataError(
            f"data has the splits {', '.join(map(str, data)) or 'none'}, but no split train. Give "
            "one of them."
        )
    return data["train"], data.get("test")


def _stored(data: Any, runs_dir: Path) -> str | Path:
    """Return the path of rows; write those in memory to `<runs_dir>/data/<digest>.jsonl`."""
    if isinstance(data, str | Path):
        return data
    if hasattr(data, "notna"):
        # A table of pandas, whose missing values are NaN.
        rows = data.astype(object).where(data.notna(), None).to_dict("records")
    else:
        rows = data.to_list() if hasattr(data, "to_list") else data
    if not isinstance(rows, Sequence) or not all(isinstance(row, Mapping) for row in rows):
        raise DataError(
            f"data is {type(data).__name__}. Give a file, hub:owner/name:split, a Dataset, "
            "a pandas.DataFrame or a list of mappings with a prompt."
        )
    try:
        text = "".join(f"{json.dumps(dict(row), ensure_ascii=False)}\n" for row in rows)
    except (TypeError, ValueError) as error:
        raise DataError(f"a row of the data is not JSON: {error}. Convert its values.") from error
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    path = (runs_dir / "data" / f"{digest}.jsonl").resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    # Each process of a run comes here with the same rows.
    with run_lock(path.parent, waits=True):
        if not path.exists():
            write_atomically(path, text)
    return path
