"""nip's tools beside training, over ours: timing, pairs of graphs, and a silent progress bar."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import torch

from nip_astra.errors import ConfigurationError, UnknownNameError
from nip_astra.nip.hyper_params import HyperParameters, ours
from nip_astra.run import prepare_experiment
from nip_astra.scenarios.graphs.generation import GraphPairParameters, generate_pairs
from nip_astra.scenarios.graphs.pair_files import save_pairs
from nip_astra.scenarios.images.data import HUB_DATASETS
from nip_astra.trainers.dry_run import time_components

GI_DATA_DIR = Path("data") / "graph_isomorphism"
"""Folder of generated pairs of graphs."""
DATASET_WRAPPER_CLASSES = {"test": None, **{n: d for n, d in HUB_DATASETS.items() if n != "local"}}
"""Datasets of images by nip's name, and their sources; `test` is included."""
NUM_REPEATS = 5
"""Timed runs of a part."""


class DummyTqdm:
    """A progress bar that shows nothing; iterates over its first argument."""

    def __init__(self, iterable: Iterable[Any] = (), *args: Any, **kwargs: Any) -> None:
        self.iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        return iter(self.iterable)

    def __enter__(self) -> DummyTqdm:
        return self

    def __exit__(self, *args: object) -> None:
        pass

    def _shows_nothing(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is no bar."""

    update = close = set_description = set_postfix = refresh = _shows_nothing


# ---- timing


class Timeable:
    """A trainer of which parts of an iteration are timed.

    Attributes
    ----------
    hyper_params : dict
        Arguments of nip's `HyperParameters`.
    """

    hyper_params: ClassVar[dict[str, Any]] = {}

    def __init__(self, *, param_scale: float = 1.0, force_cpu: bool = False) -> None:
        if param_scale != 1:
            raise ConfigurationError(
                f"param_scale={param_scale}: the sizes are those of the hyper-parameters. Leave it "
                "out, or time your own with `nip-astra time --set`."
            )
        self.device = "cpu" if force_cpu else "auto"

    def time(self) -> Timing:
        """Time every part several times."""
        parameters = ours(HyperParameters(**self.hyper_params))
        prepared = prepare_experiment(parameters, device=self.device, progress=False)
        return Timing(time_components(prepared.trainer, [], num_repeats=NUM_REPEATS))


@dataclass(frozen=True)
class Timing:
    """Seconds of the parts of an iteration, by name, one number per run."""

    seconds: Mapping[str, list[float]]

    def key_averages(self) -> Timing:
        """Return the object itself, which has the method `table`."""
        return self

    def table(self, sort_by: str = "") -> str:
        """Return a line per part with its median, in milliseconds; the order is that of a run."""
        return "\n".join(
            f"{name:<20} {1000 * median(times):10.1f} ms" for name, times in self.seconds.items()
        )


class GraphIsomorphismPpoRunTimeable(Timeable):
    """Graph isomorphism with vanilla PPO."""

    hyper_params: ClassVar[dict[str, Any]] = {
        "scenario": "graph_isomorphism",
        "trainer": "vanilla_ppo",
        "dataset": "test",
        "rl": {"frames_per_batch": 64},
    }


class GraphIsomorphismSoloAgentRunTimeable(Timeable):
    """Graph isomorphism with solo agents."""

    hyper_params: ClassVar[dict[str, Any]] = {
        "scenario": "graph_isomorphism",
        "trainer": "solo_agent",
        "dataset": "test",
    }


TIMEABLES: dict[str, type[Timeable]] = {
    "graph_isomorphism_ppo": GraphIsomorphismPpoRunTimeable,
    "graph_isomorphism_solo_agent": GraphIsomorphismSoloAgentRunTimeable,
}


def register_timeable(timeable: Any = None, *, name: str | None = None) -> Any:
    """Register a subclass of `Timeable` under a name, by default its own; a decorator."""
    if timeable is None:
        return lambda decorated: register_timeable(decorated, name=name)
    TIMEABLES[name or timeable.__name__] = timeable
    return timeable


def list_timeables() -> list[tuple[str, type[Timeable]]]:
    """Return the names and classes that can be timed."""
    return list(TIMEABLES.items())


def time_timeable(
    name: str,
    log_tensorboard_results: bool = False,
    print_results: bool = False,
    record_shapes: bool = True,
    profile_memory: bool = True,
    with_stack: bool = False,
    **options: Any,
) -> Timing:
    """Time the parts of an iteration of a registered trainer.

    Parameters
    ----------
    print_results : bool
        Whether the table is printed.
    record_shapes, profile_memory, with_stack, log_tensorboard_results : bool
        No effect: parts are timed, not profiled.
    **options
        Of the constructor.
    """
    if name not in TIMEABLES:
        raise UnknownNameError("timeable", name, TIMEABLES)
    timing = TIMEABLES[name](**options).time()
    if print_results:
        sys.stdout.write(f"{timing.table()}\n")
    return timing


def time_all_timeables(
    print_results: bool = True,
    common_kwargs: Mapping[str, Any] = {},
    per_timeable_kwargs: Mapping[str, Mapping[str, Any]] = {},
) -> dict[str, Timing]:
    """Time all registered trainers."""
    return {
        name: time_timeable(
            name,
            print_results=print_results,
            **{**common_kwargs, **per_timeable_kwargs.get(name, {})},
        )
        for name in TIMEABLES
    }


# ---- pairs of graphs


@dataclass
class GraphIsomorphicDatasetConfig:
    """Number and kinds of the pairs of graphs that are generated, by nip's names."""

    num_samples: int
    graph_sizes: list[int] = field(default_factory=lambda: [7, 8, 9, 10, 11])
    edge_probabilities: list[float] = field(default_factory=lambda: [0.2, 0.4, 0.6, 0.8])
    max_iterations: int = 5
    prop_non_isomorphic: float = 0.5
    non_iso_prop_score_1: float = 0.1
    non_iso_prop_score_2: float = 0.2
    iso_prop_from_non_iso: float = 0.5


def generate_gi_dataset(
    config: GraphIsomorphicDatasetConfig | Mapping[str, Any],
    name: str,
    batch_size: int = 800_000,
    split_name: str = "train",
    device: torch.device | str = "cpu",
) -> Path:
    """Generate pairs of graphs, and return their file, for `graph_isomorphism.dataset.file`.

    Parameters
    ----------
    config
        Which pairs; `max_iterations` has no effect.
    name : str
        Of the file in `GI_DATA_DIR`.
    batch_size, split_name, device
        No effect: all pairs are generated together on the CPU, for both splits.
    """
    if not isinstance(config, GraphIsomorphicDatasetConfig):
        config = GraphIsomorphicDatasetConfig(**config)
    parameters = GraphPairParameters(
        num_train=config.num_samples,
        num_test=config.num_samples,
        sizes=config.graph_sizes,
        edge_probabilities=config.edge_probabilities,
        isomorphic_share=1 - config.prop_non_isomorphic,
        score_1_share=config.non_iso_prop_score_1,
        score_2_share=config.non_iso_prop_score_2,
        isomorphic_graphs="matched" if config.iso_prop_from_non_iso else "independent",
    )
    path = GI_DATA_DIR / f"{name}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_pairs(
        path, train=generate_pairs(parameters, "train"), test=generate_pairs(parameters, "test")
    )
    return path
