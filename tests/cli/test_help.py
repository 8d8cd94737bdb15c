"""Help names commands and options, and a shell completes them."""

from __future__ import annotations

import pytest

from nip_astra.cli.app import app
from tests.kit.command_line import ONCE, CommandLine

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


@pytest.mark.parametrize("command", OPTIONS)
def test_help_names_the_options_of_a_command(cli: CommandLine, command: str) -> None:
    result = cli.ok(*command.split(), "--help")
    for option in OPTIONS[command]:
        assert f"--{option}" in result.out
    if not command:
        assert all(f"\n  {name} " in result.out for name in ONCE(app).commands)


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
