"""Code that must answer at once imports nothing heavy."""

from __future__ import annotations

import math
import os
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
from tests.kit.experiments import run_in

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "transformers", "tensordict", "wandb", "numpy", "peft")


def run_python(code: str) -> str:
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_commands(
    *commands: list[str], forbidden: set[str], most_seconds: float = math.inf
) -> list[tuple[str, list[str]]]:
    """Run commands in one process; exit code and forbidden modules after each.

    The first takes at most `most_seconds` of a processor.
    """
    code = (
        "import sys, time\nfrom nip_astra.cli.app import main\n"
        f"for command in {commands}:\n"
        "    sys.argv = ['nip-astra', *command]\n"
        "    try:\n        main()\n    except SystemExit as end:\n"
        f"        heavy = {forbidden} & set(sys.modules)\n"
        "        print('after', end.code or 0, time.process_time(), *sorted(heavy))\n"
    )
    lines = [line.split() for line in run_python(code).splitlines()]
    ends = [line[1:] for line in lines if line[:1] == ["after"]]
    assert float(ends[0][1]) < most_seconds
    return [(code, heavy) for code, _, *heavy in ends]


def test_importing_the_lower_floors_and_the_command_line_loads_nothing_heavy() -> None:
    modules = (
        *("nip_astra", "nip_astra.parameters", "nip_astra.experiment_settings"),
        *("nip_astra.parameters.files", "nip_astra.parameters.content", "nip_astra.plugins"),
        *("nip_astra.progress", "nip_astra.tracking.local", "nip_astra.tracking.environment"),
        *("nip_astra.cli.app", "nip_astra.astra"),
    )
    code = f"import sys, {', '.join(modules)}\nprint(*sorted(set(sys.modules) & set({HEAVY})))"
    assert run_python(code).split() == []


def test_no_help_loads_anything_heavy() -> None:
    commands = [[], *([name] for name in ONCE(app).commands)]
    forbidden = {*HEAVY, "omegaconf", "rich.table"}
    ends = run_commands(*([*words, "--help"] for words in commands), forbidden=forbidden)
    assert ends == [("0", [])] * len(commands)


def test_wrong_names_are_refused_before_anything_heavy_is_imported() -> None:
    ends = run_commands(
        ["--trainer", "ast_dop"],
        ["--trainer", "ast_dpo", "--scenario", "nowhere"],
        ["--trainer", "ast_dpo", "--parameters", "nowhere.yaml"],
        ["evaluate", "nowhere"],
        ["compare", "nowhere", "x"],
        forbidden={"torch", "transformers", "scipy"},
    )
    assert ends == [("2", [])] * 5


@pytest.fixture(scope="module")
def finished_runs(tmp_path_factory: pytest.TempPathFactory, tiny_scenario: Path) -> list[str]:
    runs = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        resolved = resolve_experiment(trainer="ast_dpo", scenario=str(tiny_scenario), seed=seed)
        run_in(runs, resolved, str(seed), test_run=True)
    return [str(runs / "0"), str(runs / "1")]


@pytest.mark.parametrize(
    ("commands", "forbidden", "seconds"),
    [
        (("list", "report"), {"torch", "transformers", "scipy"}, 1.5),
        # Quantiles of intervals come from scipy.
        (("compare",), {"torch", "transformers"}, 2.0),
        (
            ("show --trainer ast_dpo", "schema --trainer ast_dpo"),
            {"transformers", "torchrl", "scipy"},
            3.5,
        ),
    ],
)
def test_commands_that_build_nothing_start_fast(
    commands: tuple[str, ...], forbidden: set[str], seconds: float, finished_runs: list[str]
) -> None:
    words = [
        [*one.split(), *(finished_runs if one in ("report", "compare") else ())] for one in commands
    ]
    # Generous, since CPU times vary with the machine.
    ends = run_commands(*words, forbidden=forbidden, most_seconds=4 * seconds)
    assert ends == [("0", [])] * len(commands)


def test_the_package_gives_its_version_without_importing_the_rest() -> None:
    code = (
        "import sys, nip_astra\nprint(nip_astra.__version__)\n"
        "print(*sorted(m for m in sys.modules if m.startswith('nip_astra.')))"
    )
    own = ["nip_astra.lazy", "nip_astra.version"]
    assert run_python(code).split() == [nip_astra.__version__, *own]


@pytest.mark.parametrize("package", [nip_astra, parameters])
def test_every_lazy_export_and_no_other_name_is_there(package: object) -> None:
    names = package.__all__  # type: ignore[attr-defined]
    assert set(names) <= set(dir(package))
    for name in names:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        package.nothing  # type: ignore[attr-defined]  # noqa: B018 - reading it is the test


def test_the_package_alone_provides_the_needs_of_a_plugin_or_notebook() -> None:
    code = (
        "import sys\n"
        "from nip_astra import Field, HyperParameters, SubParameters, read_results, where\n"
        "from nip_astra import ExperimentSettings, load_plugin, register_conversion\n"
        "print(*sorted(set(sys.modules) & {'torch', 'transformers', 'wandb', 'pandas'}))"
    )
    assert run_python(code).split() == []
    registers = {name for name in nip_astra.__all__ if name.startswith("register_")}
    kinds = {f"register_{kind}" for kind in ALL_REGISTRIES}
    assert kinds <= registers
