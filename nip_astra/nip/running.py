"""nip's `run_experiment`, grids of experiments, and other functions called by its scripts."""

from __future__ import annotations

import logging
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from tensordict import TensorDict
from tqdm import tqdm

import nip_astra.run
from nip_astra import factory
from nip_astra.errors import ConfigurationError
from nip_astra.experiment_settings import ExperimentSettings as OurSettings
from nip_astra.lazy import import_extra
from nip_astra.nip.components import TensorDictEnvironment, dataset_of, instance_view
from nip_astra.nip.hyper_params import OPENROUTER, HyperParameters, ours
from nip_astra.nip.views import ProtocolView, Settings, view_of
from nip_astra.parameters.hyper_parameters import HyperParameters as OurHyperParameters
from nip_astra.protocols import registry
from nip_astra.resolving.resolution import ResolvedExperiment, resolve_experiment
from nip_astra.tracking.run_directory import HYPER_PARAMETERS, RunDirectory
from nip_astra.trust import read_variable

logger = logging.getLogger(__name__)

WITHOUT_EFFECT = (
    *("ignore_cache", "allow_auto_generated_run_id", "allow_overriding_wandb_config"),
    *("print_wandb_run_url", "num_dataset_threads", "num_rollout_workers", "pin_memory"),
    *("dataset_on_device", "enable_efficient_attention", "logger", "do_not_load_checkpoint"),
    *("stat_logger", "wandb_run", "base_wandb_run", "pretrained_embeddings_batch_size"),
    *("num_api_generation_timeouts", "num_api_connection_errors"),
)
"""nip's settings that change no result and are ignored here."""
HYPER_PARAMS_FILE = "hyper_params.json"
"""File of hyper-parameters in a run's folder, read by nip's scripts."""


def _settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert settings; ours are returned unchanged."""
    settings = {name: value for name, value in given.items() if name not in WITHOUT_EFFECT}
    if settings.pop("profiler", None) is not None:
        raise ConfigurationError(
            "profiler: a run profiles itself, in timings.jsonl. Leave it out, or use "
            "`nip-astra time`."
        )
    if "device" in settings:
        settings["device"] = _device(settings["device"])
    if "use_wandb" in settings:
        settings["wandb"] = "online" if settings.pop("use_wandb") else "disabled"
    for name in ("wandb_project", "wandb_entity", "wandb_group"):
        settings[name] = settings.get(name) or None
    return settings


def _device(device: str | torch.device) -> str:
    """Convert the device; nip's scripts name a GPU even if there is none."""
    requested = torch.device(device) if device != "auto" else torch.device("cpu")
    if requested.type != "cuda":
        return str(device)
    if not torch.cuda.is_available():
        logger.warning("there is no GPU for device=%s; the run takes the CPU", device)
        return "cpu"
    if requested.index is not None:
        torch.cuda.set_device(requested.index)
    return "cuda"


class ExperimentSettings(Settings):
    """Settings by nip's names; those of `WITHOUT_EFFECT` are accepted."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**_settings(settings))


def run_experiment(
    hyper_params: HyperParameters | OurHyperParameters,
    *,
    allow_resuming_wandb_run: bool = False,
    **settings: Any,
) -> nip_astra.run.ExperimentResult:
    """Run an experiment, in `runs/<run_id>`; see `nip_astra.run_experiment`.

    Parameters
    ----------
    allow_resuming_wandb_run : bool
        Whether an existing run of this `run_id` is resumed.
    **settings
        nip's, and ours.
    """
    fields = _settings(settings)
    run_id = fields.get("run_id")
    run = Path(fields.get("runs_dir", "runs")) / str(run_id)
    if allow_resuming_wandb_run and run_id is not None and run.is_dir():
        del fields["run_id"]
        return nip_astra.run.resume_experiment(run, **fields)
    return nip_astra.run.run_experiment(ours(hyper_params), **fields)


@dataclass
class PreparedExperimentInfo:
    """Facts about an experiment before it runs."""

    total_num_iterations: int


def prepare_experiment(
    hyper_params: HyperParameters | OurHyperParameters, **settings: Any
) -> PreparedExperimentInfo:
    """Build everything once, and count the iterations of all loops."""
    prepared = nip_astra.run.prepare_experiment(ours(hyper_params), **_settings(settings))
    return PreparedExperimentInfo(prepared.total_num_iterations)


def resolved_of(hyper_params: HyperParameters | OurHyperParameters) -> ResolvedExperiment:
    """Resolve the experiment of nip's hyper-parameters, or of ours."""
    return resolve_experiment(hyper_params=ours(hyper_params))


def converted(hyper_params: Any, *, kind: str, is_text: bool = False) -> Any:
    """Return our hyper-parameters with nip's names in addition, of nip's or of ours."""
    is_original = isinstance(hyper_params, HyperParameters)
    ours_of_it = resolved_of(hyper_params).hyper_params if is_original else hyper_params
    original = hyper_params if is_original else None
    return view_of(ours_of_it, kind=kind, is_text=is_text, original=original)


def build_scenario_instance(
    hyper_params: HyperParameters | OurHyperParameters, settings: OurSettings
) -> Any:
    """Build the components that the hyper-parameters describe, with nip's names in addition."""
    resolved = resolved_of(hyper_params)
    instance = factory.build_scenario_instance(
        resolved.hyper_params,
        settings,
        kind=resolved.kind,
        scenario_dir=resolved.scenario_dir,
        trainer_type=resolved.trainer_class.trainer_type,
    )
    return instance_view(instance, converted(hyper_params, kind=resolved.kind))


def build_protocol_handler(
    hyper_params: HyperParameters | OurHyperParameters, settings: OurSettings | None = None
) -> ProtocolView:
    """Build the protocol, with nip's names in addition; it needs no settings."""
    resolved = resolved_of(hyper_params)
    return ProtocolView(registry.build_protocol_handler(resolved.hyper_params))


def Environment(  # noqa: N802  # nip's name of a class
    hyper_params: HyperParameters | OurHyperParameters,
    settings: OurSettings,
    dataset: TensorDict | None = None,
    protocol_handler: ProtocolView | None = None,
    *,
    train: bool = True,
) -> TensorDictEnvironment:
    """Build the environment of a dataset of `Dataset`; the protocol is that of the parameters."""
    instance = build_scenario_instance(hyper_params, settings)
    environment: TensorDictEnvironment = (
        instance.train_environment if train else instance.test_environment
    )
    return environment if dataset is None else environment.with_datapoints(dataset)


def Dataset(  # noqa: N802  # nip's name of a class
    hyper_params: HyperParameters | OurHyperParameters,
    settings: OurSettings,
    protocol_handler: ProtocolView | None = None,
    *,
    train: bool = True,
) -> TensorDict:
    """Build the datapoints of a scenario as frames before any message, in nip's layout."""
    instance = build_scenario_instance(hyper_params, settings)
    return dataset_of(instance.train_environment if train else instance.test_environment)


def checkpoint_base_dir(run_id: str) -> Path:
    """Return a run's folder, after writing its hyper-parameters for nip's scripts."""
    directory = Path("runs") / run_id
    stored = directory / HYPER_PARAMETERS
    if stored.is_file() and not (directory / HYPER_PARAMS_FILE).exists():
        values = yaml.safe_load(stored.read_text(encoding="utf-8"))
        RunDirectory.open(directory).write_json(HYPER_PARAMS_FILE, values)
    return directory


# ---- grids of experiments


@dataclass
class ExperimentFunctionArguments:
    """Arguments of the function that runs one experiment of a grid.

    Attributes
    ----------
    combo : dict
        One combination of the grid's values.
    run_id, common_run_name : str
        Names of the run and of the whole grid.
    cmd_args : Namespace
        The options of the command line.
    tqdm_func : callable
        Makes progress bars.
    child_logger_adapter : LoggerAdapter
        Logger of the run.
    global_tqdm_step_fn : callable
        Called once per iteration.
    """

    combo: dict[str, Any]
    run_id: str
    cmd_args: Namespace
    common_run_name: str
    tqdm_func: Callable[..., Any]
    child_logger_adapter: _Logger
    global_tqdm_step_fn: Callable[[], None]


class _Logger(logging.LoggerAdapter[logging.Logger]):
    """A logger that prefixes its messages with the run's position in the grid."""

    def process(self, msg: Any, kwargs: Any) -> tuple[str, Any]:
        return f"{(self.extra or {})['prefix']}{msg}", kwargs

    @property
    def level(self) -> int:
        """Level of the logger."""
        return self.logger.level


def _no_step() -> None:
    """Replace a bar that the processes of a grid do not share."""


def _show_log(options: Namespace) -> None:
    """Show the log of the runs in the terminal, as the options request."""
    level = logging.INFO if options.verbose else logging.WARNING
    level = logging.ERROR if options.quiet else level
    logger.setLevel(logging.DEBUG if options.debug else level)
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler())


def _run_in_process(
    experiment_fn: Callable[[ExperimentFunctionArguments], None],
    arguments: ExperimentFunctionArguments,
) -> None:
    """Run one experiment of a grid in a new process."""
    _show_log(arguments.cmd_args)
    experiment_fn(arguments)


class HyperparameterExperiment:
    """Runs a function once for each combination of a grid's values.

    Scripts add their own options to `parser` before calling `run`.

    Parameters
    ----------
    param_grid : Mapping of sequences
        Values of each parameter, by name.
    experiment_fn : callable
        Takes `ExperimentFunctionArguments`, and runs one experiment.
    run_id_fn : callable, optional
        `(number or None, options) -> run id`; of the whole grid for None.
    run_preparer_fn : callable, optional
        `(combination, options) -> PreparedExperimentInfo`; called for all before the first run.
    """

    def __init__(
        self,
        param_grid: Mapping[str, Sequence[Any]],
        experiment_fn: Callable[[ExperimentFunctionArguments], None],
        run_id_fn: Callable[[int | None, Namespace], str] | None = None,
        run_preparer_fn: Callable[[dict[str, Any], Namespace], Any] | None = None,
        experiment_name: str = "EXPERIMENT",
        arg_parser_description: str = "Run experiments over a grid of hyper-parameters",
        default_wandb_project: str | None = None,
        allow_resuming_wandb_run: bool = False,
        add_run_infix_argument: bool = True,
        default_num_workers: int = 1,
        output_width: int = 70,
    ) -> None:
        self.param_grid, self.experiment_fn = param_grid, experiment_fn
        self.run_id_fn, self.run_preparer_fn = run_id_fn or self._run_id, run_preparer_fn
        self.experiment_name = experiment_name
        self.allow_resuming_wandb_run = allow_resuming_wandb_run
        self.parser = ArgumentParser(
            description=arg_parser_description, formatter_class=ArgumentDefaultsHelpFormatter
        )
        add = self.parser.add_argument
        add("-d", "--debug", action="store_true", help="Log everything")
        add("-v", "--verbose", action="store_true", help="Log more")
        add("-q", "--quiet", action="store_true", help="Log less")
        if add_run_infix_argument:
            add("--run-infix", default="a", help="Middle of the run ids")
        add("--use-wandb", action="store_true", help="Log to W&B")
        project = default_wandb_project or get_env_var("WANDB_PROJECT", "")
        add("--wandb-project", default=project, help="W&B project")
        add("--wandb-entity", default=get_env_var("WANDB_ENTITY", ""), help="W&B user or team")
        add("--tag", default="", help="Tag of the W&B runs")
        add("--gpu-num", type=int, default=0, help="Number of the GPU")
        add("--ignore-cache", action="store_true", help="Has no effect: caches are never stale")
        add("--no-pretrain", dest="no_pretrain", action="store_true", help="Pretrain no agents")
        add("--num-skip", type=int, default=0, help="Combinations to leave out at the start")
        self._add_arguments(default_num_workers)
        self.cmd_args: Namespace | None = None

    def _add_arguments(self, default_num_workers: int) -> None:
        """Add the options of one kind of grid."""

    def _run_id(self, number: int | None, cmd_args: Namespace) -> str:
        name = self.experiment_name.lower()
        return name if number is None else f"{name}_{number}"

    @property
    def combinations(self) -> Iterator[dict[str, Any]]:
        """Yield the combinations; the alphabetically last name changes fastest."""
        names = sorted(self.param_grid)
        for values in product(*(self.param_grid[name] for name in names)):
            yield dict(zip(names, values, strict=True))

    @property
    def common_run_name(self) -> str:
        """Name of the whole grid."""
        return self.run_id_fn(None, self._options)

    @property
    def _options(self) -> Namespace:
        if self.cmd_args is None:
            raise ConfigurationError("the options are not parsed yet. Call run().")
        return self.cmd_args

    def _chosen(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the combinations that this call runs, with their numbers."""
        return list(enumerate(self.combinations))[self._options.num_skip :]

    def run(self) -> None:
        """Read the options, prepare all runs, and run them."""
        options = self.cmd_args = self.parser.parse_args()
        _show_log(options)
        chosen = self._chosen()
        if self.run_preparer_fn is not None:
            for _, combo in chosen:
                self.run_preparer_fn(combo, options)
        self._run(chosen)

    def _run(self, chosen: Sequence[tuple[int, dict[str, Any]]]) -> None:
        """Run the experiments sequentially; the first failure ends all."""
        for number, combo in chosen:
            self.experiment_fn(self._arguments(number, combo))

    def _arguments(self, number: int, combo: dict[str, Any]) -> ExperimentFunctionArguments:
        options = self._options
        run_id = self.run_id_fn(number, options)
        log = logging.getLogger(f"{__name__}.{run_id}")
        return ExperimentFunctionArguments(
            combo,
            run_id,
            options,
            self.common_run_name,
            tqdm,
            _Logger(log, {"prefix": f"[{run_id}] "}),
            _no_step,
        )


class SequentialHyperparameterExperiment(HyperparameterExperiment):
    """Runs the combinations of a grid sequentially."""

    def _add_arguments(self, default_num_workers: int) -> None:
        add = self.parser.add_argument
        add("--combo-groups", type=int, default=1, help="Parts into which the grid is divided")
        add("--combo-num", type=int, default=0, help="Number of the part to run")

    def _chosen(self) -> list[tuple[int, dict[str, Any]]]:
        options = self._options
        mine = [
            one
            for one in enumerate(self.combinations)
            if one[0] % options.combo_groups == options.combo_num
        ]
        return mine[options.num_skip :]


class MultiprocessHyperparameterExperiment(HyperparameterExperiment):
    """Runs several combinations of a grid in parallel, each in its own process."""

    def _add_arguments(self, default_num_workers: int) -> None:
        add = self.parser.add_argument
        add("--num-workers", type=int, default=default_num_workers, help="Runs at a time")
        add("--max-tasks-per-child", type=int, default=1, help="Runs of one process")

    def _run(self, chosen: Sequence[tuple[int, dict[str, Any]]]) -> None:
        options = self._options
        if options.num_workers <= 1:
            super()._run(chosen)
            return
        with ProcessPoolExecutor(
            options.num_workers,
            mp_context=get_context("spawn"),
            max_tasks_per_child=options.max_tasks_per_child,
        ) as pool:
            runs = [
                pool.submit(_run_in_process, self.experiment_fn, self._arguments(*one))
                for one in chosen
            ]
            for run in tqdm(as_completed(runs), total=len(runs), desc=self.experiment_name):
                run.result()


# ---- environment variables and hosted models


class EnvironmentVariableDoesNotExistError(ConfigurationError):
    """An environment variable is not set."""


_NOT_GIVEN = object()


def get_env_var(var_name: str, default: Any = _NOT_GIVEN) -> Any:
    """Return an environment variable; `.env` files are not read."""
    value = read_variable(var_name)
    value = default if value is None else value
    if value is _NOT_GIVEN:
        raise EnvironmentVariableDoesNotExistError(
            f"the environment variable {var_name} is not set. Export it before the script starts."
        )
    return value


def env_var_default_factory(var_name: str, default: Any = _NOT_GIVEN) -> Callable[[], Any]:
    """Return a function that calls `get_env_var` with these arguments."""
    return lambda: get_env_var(var_name, default)


def load_env_once() -> None:
    """Do nothing: variables are those of the process."""


def _get_openrouter_response(
    model: str,
    messages: Sequence[Mapping[str, str]],
    api_key: str | None = None,
    *,
    temperature: float = 1.0,
    get_log_probs: bool = False,
    get_top_logprobs: int | None = None,
    num_responses: int = 1,
    force_multiple_generations: bool = False,
) -> list[dict[str, Any]]:
    """Return answers of an OpenRouter model, with log-probabilities of their tokens if requested.

    Parameters
    ----------
    api_key : str, optional
        Default: the variable `OPENROUTER_API_KEY`.
    get_top_logprobs : int, optional
        Number of alternatives per token.
    force_multiple_generations : bool
        No effect: OpenRouter requires a request per answer.

    Returns
    -------
    list of dict
        `message`, `log_probs` (a list of `token` and `logprob`, or None) and `top_logprobs` (such
        a list for each token).
    """
    openai = import_extra("openai", "a model of OpenRouter", "api")
    asks_logprobs = get_log_probs or get_top_logprobs is not None
    key = api_key or get_env_var("OPENROUTER_API_KEY")
    with openai.OpenAI(base_url=OPENROUTER, api_key=key) as client:
        logprob_options: dict[str, Any] = {"logprobs": True} if asks_logprobs else {}
        logprob_options |= {} if get_top_logprobs is None else {"top_logprobs": get_top_logprobs}
        choices = [
            client.chat.completions.create(
                model=model,
                messages=cast(Any, messages),
                temperature=temperature,
                **logprob_options,
            ).choices[0]
            for _ in range(num_responses)
        ]
    return [_response(choice, get_log_probs, get_top_logprobs) for choice in choices]


def _response(choice: Any, get_log_probs: bool, get_top_logprobs: int | None) -> dict[str, Any]:
    tokens = choice.logprobs.content if choice.logprobs else None
    response: dict[str, Any] = {"message": choice.message.content, "log_probs": None}
    if tokens is not None and get_log_probs:
        response["log_probs"] = [_token(one) for one in tokens]
    if tokens is not None and get_top_logprobs is not None:
        response["top_logprobs"] = [[_token(other) for other in one.top_logprobs] for one in tokens]
    return response


def _token(token: Any) -> dict[str, Any]:
    return {"token": token.token, "logprob": token.logprob}
