"""Code that must answer at once imports nothing heavy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import nip_astra
from nip_astra import parameters
from nip_astra.cli.app import app
from nip_astra.registry import ALL_REGISTRIES
from nip_astra.resolving.resolution import resolve_experiment
from tests.kit.command_line import ONCE
from tests.kit.documents import ROOT
from tests.kit.experiments import run_in
from tests.report.runs import write_protocol_run

HEAVY = {"torch", "transformers", "tensordict", "wandb", "numpy", "peft"}


def run_python(code: str) -> list[list[str]]:
    """The words of each line that a process prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def check_commands(commands: list[tuple[str, int, set[str]]], most_seconds: float) -> None:
    """Run commands, each with its exit code and forbidden modules, in one new process."""
    code = (
        "import sys, time\nfrom nip_astra.cli.app import main\n"
        f"for command, _, forbidden in {commands}:\n"
        "    sys.argv = ['nip-astra', *command.split()]\n"
        "    try:\n        main()\n    except SystemExit as end:\n"
        "        print('after', end.code or 0, *sorted(forbidden & set(sys.modules)))\n"
        "print('seconds', time.process_time())\n"
    )
    *lines, (_, seconds) = run_python(code)
    ends = [line[1:] for line in lines if line[:1] == ["after"]]
    assert ends == [[str(exit_code)] for _, exit_code, _ in commands]
    # Generous, since CPU times vary with the machine.
    assert float(seconds) < 4 * most_seconds


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
    version, own, *heavy = run_python(code)
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
    check_commands(
        [
            *((f"{name} --help", 0, {*HEAVY, "omegaconf", "rich.table"}) for name in names),
            *((one, 2, {*models, "scipy"}) for one in wrong_names),
            ("evaluate nowhere", 2, {*models, "scipy"}),
            ("compare nowhere x", 2, {*models, "scipy"}),
            ("list", 0, {*models, "scipy"}),
            (f"report {runs}", 0, {*models, "scipy"}),
            (f"report {write_protocol_run(tmp_path / 'proof')}", 0, models),
            # Quantiles of intervals come from scipy.
            (f"compare {runs}", 0, models),
        ],
        most_seconds=2.5,
    )


def test_parameters_are_shown_without_models() -> None:
    forbidden = {"transformers", "torchrl", "scipy"}
    commands = [(f"{name} --trainer ast_dpo", 0, forbidden) for name in ("show", "schema")]
    check_commands(commands, most_seconds=3.5)


@pytest.mark.parametrize("package", [nip_astra, parameters])
def test_every_lazy_export_and_no_other_name_is_there(package: object) -> None:
    names = package.__all__  # type: ignore[attr-defined]
    assert set(names) <= set(dir(package))
    for name in names:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        package.nothing  # type: ignore[attr-defined]  # noqa: B018 - reading it is the test
