"""Help answers at once, and names every option."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nip_astra.cli.app import app
from tests.kit.command_line import CommandLine

HEAVY = ("torch", "transformers", "tensordict", "wandb", "numpy", "omegaconf", "rich.table")
COMMANDS = (
    *("run", "resume", "list", "show", "schema"),
    *("evaluate", "score", "compare", "report", "export", "push", "doctor"),
    *("dataset", "time"),
)
OPTIONS = {
    "": (
        *("trainer", "scenario", "parameters", "set", "seed", "plugin", "device", "wandb"),
        *("run-id", "runs-dir", "num-threads", "settings", "test-run", "dry-run", "debug"),
    ),
    "evaluate": ("target", "scorer", "labelled", "embedder", "fail-if", "overwrite"),
    "score": ("scorer", "labelled", "embedder", "threshold"),
    "report": ("output", "redact", "reveal"),
    "export": ("format", "output"),
    "doctor": ("runs-dir", "online", "json"),
}


def test_no_help_loads_anything_heavy() -> None:
    code = (
        "import sys\nfrom nip_astra.cli.app import main\n"
        f"for words in [[], *([one] for one in {COMMANDS})]:\n"
        "    sys.argv = ['nip-astra', *words, '--help']\n"
        "    try:\n        main()\n    except SystemExit as end:\n"
        "        assert end.code in (0, None), words\n"
        f"print('loaded:', sorted(set(sys.modules) & set({HEAVY})))"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "loaded: []"
    # The first also has the options of `run`.
    assert done.stdout.count("Usage: ") == len(COMMANDS) + 2


@pytest.mark.parametrize("command", OPTIONS)
def test_help_names_the_options_of_a_command(cli: CommandLine, command: str) -> None:
    said = cli.ok(*command.split(), "--help")
    for option in OPTIONS[command]:
        assert f"--{option}" in said.out
    if not command:
        assert all(f"\n  {name} " in said.out for name in COMMANDS)


@pytest.mark.parametrize(
    ("typed", "proposed"),
    [
        ("nip-astra ev", {"evaluate"}),
        ("nip-astra --scen", {"--scenario"}),
        ("nip-astra --trainer ast_dp", {"ast_dpo"}),
        ("nip-astra --trainer ast_dpo --scenario pocket_c", {"pocket_chat", "pocket_chat_api"}),
        ("nip-astra evaluate m", {"mine"}),
        ("nip-astra report other", set()),
    ],
)
def test_a_shell_completes_commands_options_and_names(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch, typed: str, proposed: set[str]
) -> None:
    (cli.folder / "runs" / "mine").mkdir(parents=True)
    cli.write("runs/mine/hyper_parameters.yaml", "")
    (cli.folder / "runs" / "other").mkdir()
    monkeypatch.setenv("_NIP_ASTRA_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    with pytest.raises(SystemExit):
        app(prog_name="nip-astra")
    assert set(cli.capsys.readouterr().out.split()) == proposed
