"""New processes: what must answer at once imports nothing heavy, and numbers are the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import nip_astra
from nip_astra import parameters
from nip_astra.cli.app import app
from nip_astra.registry import ALL_REGISTRIES
from nip_astra.resolving.resolution import resolve_experiment
from tests.kit.command_line import ONCE
from tests.kit.documents import ROOT
from tests.kit.experiments import FAST, metrics_of, run_in
from tests.kit.toy_protocol_scenario import toy_kind, toy_trainer
from tests.report.runs import write_protocol_run

WAITING = "OMP_WAIT_POLICY"
HEAVY = {"torch", "transformers", "tensordict", "wandb", "numpy", "peft"}


def run_python(code: str, *arguments: str, **environment: str) -> list[str]:
    """The lines that a new process prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def code_of(commands: list[tuple[str, int, set[str]]]) -> str:
    """Code that runs commands, each with its exit code and forbidden modules."""
    return (
        "import sys, time\nfrom nip_astra.cli.app import main\n"
        f"for command, _, forbidden in {commands}:\n"
        "    sys.argv[1:], arguments = command.split(), sys.argv[1:]\n"
        "    try:\n        main()\n    except SystemExit as end:\n"
        "        print('after', end.code or 0, *sorted(forbidden & set(sys.modules)))\n"
        "    sys.argv[1:] = arguments\n"
        "print('seconds', time.process_time())\n"
    )


def check(lines: list[str], commands: list[tuple[str, int, set[str]]], most_seconds: float) -> None:
    """Check the output of such code."""
    ends = [line.split()[1:] for line in lines if line.startswith("after ")]
    assert ends == [[str(exit_code)] for _, exit_code, _ in commands]
    (seconds,) = (line.split()[1] for line in lines if line.startswith("seconds "))
    # Generous, since CPU times vary with the machine.
    assert float(seconds) < 4 * most_seconds


SHOW_POLICY = "import os, nip_astra; print(os.environ.get('GOMP_SPINCOUNT'))"


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [({}, "3000"), ({WAITING: "ACTIVE"}, "None"), ({"GOMP_SPINCOUNT": "777"}, "777")],
)
def test_threads_spin_only_briefly_unless_the_user_chooses(
    monkeypatch: pytest.MonkeyPatch, chosen: dict[str, str], expected: str
) -> None:
    # This process has imported the package, which set it.
    monkeypatch.delenv(WAITING, raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert run_python(SHOW_POLICY, **chosen) == [expected]


@pytest.mark.skipif(sys.platform != "linux", reason="torch's OpenMP is another one")
@pytest.mark.parametrize(("chosen", "spins"), [({}, "3000"), ({"GOMP_SPINCOUNT": "777"}, "777")])
def test_openmp_reads_the_policy_when_torch_is_loaded(
    monkeypatch: pytest.MonkeyPatch, chosen: dict[str, str], spins: str
) -> None:
    monkeypatch.delenv(WAITING, raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    # The library prints its settings when it is loaded.
    environment = os.environ | chosen | {"OMP_DISPLAY_ENV": "verbose"}
    code = "import sys, nip_astra as na; assert 'torch' not in sys.modules; na.masked_mean"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("this torch is built with another OpenMP")
    assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr


def test_imports_of_the_package_and_of_its_lower_floors_load_nothing_heavy() -> None:
    modules = (
        *("nip_astra.parameters", "nip_astra.experiment_settings", "nip_astra.plugins"),
        *("nip_astra.parameters.files", "nip_astra.parameters.content", "nip_astra.progress"),
        *("nip_astra.tracking.local", "nip_astra.tracking.environment", "nip_astra.cli.app"),
        "nip_astra.astra",
    )
    code = (
        "import sys, nip_astra\nprint(nip_astra.__version__)\n"
        "print(*sorted(m for m in sys.modules if m.startswith('nip_astra.')))\n"
        f"import {', '.join(modules)}\nprint(*sorted(set(sys.modules) & {HEAVY}))\n"
        # What a plug-in or notebook needs.
        "from nip_astra import Field, HyperParameters, SubParameters, read_results, where\n"
        "from nip_astra import ExperimentSettings, load_plugin, register_conversion\n"
        "print(*sorted(set(sys.modules) & {'torch', 'transformers', 'wandb', 'pandas'}))"
    )
    version, own, *heavy = (line.split() for line in run_python(code))
    assert version == [nip_astra.__version__]
    assert own == ["nip_astra.lazy", "nip_astra.version"]
    assert heavy == [[], []]
    assert {f"register_{kind}" for kind in ALL_REGISTRIES} <= set(nip_astra.__all__)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_scenario: Path) -> str:
    """The paths of two finished stress tests."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        resolved = resolve_experiment(trainer="ast_dpo", scenario=str(tiny_scenario), seed=seed)
        run_in(folder, resolved, str(seed), test_run=True)
    return f"{folder / '0'} {folder / '1'}"


def test_help_wrong_names_and_commands_about_runs_load_nothing_heavy(
    runs: str, tmp_path: Path
) -> None:
    names = ["", *ONCE(app).commands]
    wrong = ("", " --scenario nowhere", " --parameters nowhere.yaml")
    wrong_names = [f"--trainer {'ast_dpo' if more else 'ast_dop'}{more}" for more in wrong]
    models = {"torch", "transformers"}
    commands = [
        *((f"{name} --help", 0, {*HEAVY, "omegaconf", "rich.table"}) for name in names),
        *((one, 2, {*models, "scipy"}) for one in wrong_names),
        ("evaluate nowhere", 2, {*models, "scipy"}),
        ("compare nowhere x", 2, {*models, "scipy"}),
        ("list", 0, {*models, "scipy"}),
        (f"report {runs}", 0, {*models, "scipy"}),
        (f"report {write_protocol_run(tmp_path / 'proof')}", 0, models),
        # Quantiles of intervals come from scipy.
        (f"compare {runs}", 0, models),
    ]
    check(run_python(code_of(commands)), commands, most_seconds=2.5)


NO_MODELS = {"transformers", "torchrl", "scipy"}
SHOWN = [(f"{name} --trainer ast_dpo", 0, NO_MODELS) for name in ("show", "schema")]
NUMBERS = """
import json
from nip_astra.overview import schema
# First, because the rest registers names.
shipped = schema()
from tests.test_cold_start import numbers_of
print(json.dumps({"schema": shipped, "numbers": numbers_of(3, *sys.argv[1:])}))
"""


def numbers_of(seed: int, scenario: str, folder: str) -> Any:
    """The last figures of provers and verifiers, and the metrics of an attacker."""
    with toy_kind():
        trainer = toy_trainer(seed=seed)
        trainer.train()
    overrides = ["training.num_iterations=2", *FAST]
    resolved = resolve_experiment(
        trainer="ast_dpo", scenario=scenario, overrides=overrides, seed=seed
    )
    metrics = metrics_of(run_in(Path(folder), resolved, str(seed)))
    return json.loads(json.dumps([trainer.results["after"], trainer.state.last, metrics]))


@pytest.fixture(scope="module")
def printed(tiny_scenario: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Output of a new process; its hash seed differs from this process's."""
    hash_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    arguments = str(tiny_scenario), str(tmp_path_factory.mktemp("a"))
    return run_python(code_of(SHOWN) + NUMBERS, *arguments, PYTHONHASHSEED=hash_seed)


def test_parameters_are_shown_without_models(printed: list[str]) -> None:
    check(printed, SHOWN, most_seconds=3.5)


def test_the_schema_that_ships_is_that_of_the_classes(printed: list[str]) -> None:
    """In its own process: in this process other tests have registered names."""
    ships = (ROOT / "parameters" / "schema.json").read_text(encoding="utf-8")
    command = "python run.py schema > parameters/schema.json"
    assert json.loads(printed[-1])["schema"] == json.loads(ships), f"write it anew: {command}"


def test_equal_parameters_give_equal_numbers_and_another_seed_others(
    printed: list[str], tiny_scenario: Path, tmp_path: Path
) -> None:
    mine, other = (numbers_of(seed, str(tiny_scenario), str(tmp_path)) for seed in (3, 4))
    assert json.loads(printed[-1])["numbers"] == mine
    assert len(mine[-1]) == 2
    assert all(one != another for one, another in zip(mine, other, strict=True))


@pytest.mark.parametrize("package", [nip_astra, parameters])
def test_every_lazy_export_and_no_other_name_is_there(package: object) -> None:
    names = package.__all__
    assert set(names) <= set(dir(package))
    for name in names:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        package.nothing  # noqa: B018 - reading it is the test
