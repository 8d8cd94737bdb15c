"""Settings apply where a run takes place; settings of the process alone are not written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nip_astra.errors import ConfigurationError, ParameterError, StopRequested
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import resume_experiment, run_experiment
from nip_astra.tracking.run_directory import RunDirectory
from tests.kit.messages import says


def test_settings_come_back_from_their_file_without_their_runtime_fields(tmp_path: Path) -> None:
    runtime = {"run_directory": RunDirectory(tmp_path), "tqdm_func": print}
    runtime["global_tqdm_step_fn"] = lambda: None
    written = ExperimentSettings(wandb="offline", num_threads=2, **runtime).to_dict()
    assert not runtime.keys() & written
    again = ExperimentSettings.from_dict(written)
    assert again.to_dict() == written
    assert (again.run_directory, again.wandb, again.num_threads) == (None, "offline", 2)


@pytest.mark.parametrize(
    ("values", "facts"),
    [
        ({"device": "gpu"}, ["cpu, cuda, auto", '"gpu"']),
        ({"wandb": "ofline"}, ["disabled, offline, online", '"ofline"', "'offline'"]),
        ({"num_threads": 0}, ["at least 1", "0"]),
        ({"checkpoint_period": -1}, ["at least 0", "-1"]),
        ({"test_run": "yes"}, ["true or false", '"yes"']),
        ({"runs": "x"}, ["unknown", '"x"', "'runs_dir'"]),
        ({"run_directory": "runs"}, ['"runs"']),
        ({"tqdm_func": 3}, ["3"]),
    ],
)
def test_a_wrong_setting_is_reported(values: dict[str, Any], facts: list[str]) -> None:
    for make in (ExperimentSettings.from_dict, lambda given: ExperimentSettings(**given)):
        with pytest.raises(ParameterError) as caught:
            make(values)
        (fault,) = caught.value.faults
        assert fault.path == next(iter(values))
        assert says(fault, *facts)


@pytest.mark.parametrize(
    "given",
    [
        {"run_directory": RunDirectory(Path("x"))},
        *({"sharding": "fsdp"}, {"process_store": "meet"}, {"ray_address": "auto"}),
        *({"actor_cpus": 2.0}, {"actor_gpus": 1.0}),
    ],
)
def test_settings_that_a_run_does_not_read_are_refused_by_name(
    toy: Path, tmp_path: Path, given: dict[str, Any]
) -> None:
    resolved = resolve_experiment(trainer="toy_trainer", scenario=str(toy))
    with pytest.raises(ConfigurationError, match=next(iter(given))):
        run_experiment(resolved, runs_dir=str(tmp_path / "runs"), progress=False, **given)
    assert list(tmp_path.iterdir()) == []


def test_a_stop_flag_stops_a_run_after_its_work_is_saved(toy: Path, tmp_path: Path) -> None:
    resolved = resolve_experiment(trainer="toy_trainer", scenario=str(toy))
    settings = {"runs_dir": str(tmp_path), "run_id": "one", "progress": False}
    with pytest.raises(StopRequested, match="notebook"):
        run_experiment(resolved, stop_flag=lambda: "notebook", **settings)
    assert len((tmp_path / "one" / "metrics.jsonl").read_text().splitlines()) == 1
    for given in ({"run_directory": RunDirectory(tmp_path)}, {"actor_cpus": 2.0}):
        with pytest.raises(ConfigurationError, match=next(iter(given))):
            resume_experiment(tmp_path / "one", progress=False, **given)
    assert resume_experiment(tmp_path / "one", progress=False).results["last"] == 4.5
