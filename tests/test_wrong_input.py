"""Wrong input, from the command line to the facts in the message.

Plug-ins that fail are in `test_wrong_plugins.py`, names and options in `test_mistakes.py`.
"""

from __future__ import annotations

import sys

import pytest
import torch

from tests.kit.command_line import CommandLine, refused
from tests.kit.messages import says

MODEL = "ast_chat.target.language_model.model"
ATTACKER = "ast_chat.attacker.language_model"
VALUE = ["1 parameter", "(from --set)"]
"""Facts about a parameter with a wrong value."""


@pytest.mark.parametrize(
    ("override", "facts"),
    [
        ("ast_dpo.beta=${traning.lr}", ["ast_dpo.beta (from --set)", "'traning.lr'"]),
        ("ast_chat.scorer._type=clasifier", ["scorer._type", "'clasifier'", "'classifier'?"]),
        (f"{ATTACKER}.model=./none", ["'./none'", "not exist", ".gguf"]),
        (f"{MODEL}=./none", ["'./none'", "not exist", ".gguf", "hub id"]),
        (f"{MODEL}=package://no_such_package/x", ["no_such_package/x'", "pip install"]),
        (f"{MODEL}=package://no.such/x", ["no.such/x'", "package", "pip install"]),
        (f"{MODEL}=hub://a/b", ["hub://", "'hub://a/b'"]),
        ("ast_chat.attacker.system_prompt=hello", ["template", "'system'", "system_prompt"]),
        ("ast_chat.scorer.model=./none", ["'./none'", "not exist", "folder"]),
        ("ast_chat.scorer.label=rud", ["'rud'", "'rude'?", "civil, rude"]),
        ("ast_chat.prompts.dev=scenario://none.txt", ["'scenario://none.txt'", ".csv"]),
        ("ast_chat.target.max_new_tokens=96", ["target's window of 96", " 0 ", "turn of 96"]),
        ("training.lr=.nan", [*VALUE, "training.lr: "]),
        (
            "ast_chat.planted_failures=[{name: x, probe: (}]",
            [*VALUE, "planted_failures.0.probe: "],
        ),
        (
            "ast_chat.planted_failures=[{name: x, probe: a}, {name: x, probe: b}]",
            [*VALUE, "ast_chat.planted_failures: ", "['x']"],
        ),
        ("ast_chat.attacker.min_new_tokens=7", [*VALUE, "min_new_tokens: ", "max_new_tokens", "6"]),
        *(
            (
                f"{ATTACKER}.lora={{target_modules: {targets}}}",
                ["lora.target_modules", "'q_prj'", "'q_proj'?", "down_proj, gate_proj"],
            )
            for targets in ("[v_proj, q_prj]", "q_prj")
        ),
    ],
)
def test_a_parameter_that_cannot_be_used_is_reported(
    cli: CommandLine, override: str, facts: list[str]
) -> None:
    assert says(refused(cli.run(overrides=(override,))), *facts)


@pytest.mark.parametrize(
    ("prompts", "facts"),
    [
        ("\n\n", ["mine.txt", "no prompts"]),
        ("good day\nhello\nfine thanks\n", ["train and test", "2", "'good day'"]),
        (f"good mat\n{'hello ' * 100}\n", ["prompt 2", "'hello hello", "96", "90"]),
    ],
    ids=["none", "of the train split too", "too long"],
)
def test_unplayable_prompts_are_reported(cli: CommandLine, prompts: str, facts: list[str]) -> None:
    path = cli.write("mine.txt", prompts)
    assert says(refused(cli.run(overrides=(f"ast_chat.prompts.test={path}",))), *facts)


@pytest.mark.parametrize(
    ("scenario", "facts"),
    [
        ("kind: ast_caht\n", ["scenario kind", "'ast_caht'", "'ast_chat'?"]),
        ("training: {lr: 1e-3}\n", ["scenario.yaml", "`kind`", "ast_chat, "]),
    ],
)
def test_an_unknown_kind_of_scenario(cli: CommandLine, scenario: str, facts: list[str]) -> None:
    (cli.folder / "mine").mkdir()
    cli.write("mine/scenario.yaml", scenario)
    assert says(refused(cli("--trainer", "ast_dpo", "--scenario", "mine")), *facts)


def test_a_gpu_where_there_is_none(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert says(refused(cli.run("--device", "cuda")), "'cuda'", "no GPU", "--device cpu")


def test_a_folder_that_is_no_complete_language_model(cli: CommandLine) -> None:
    (cli.folder / "empty").mkdir()
    broken = cli.folder / "broken"
    broken.mkdir()
    for file in (cli.scenario / "target").iterdir():
        (broken / file.name).write_bytes(file.read_bytes()[:100])
    for folder, fact in (
        (cli.folder / "empty", "config.json"),
        (broken, "could not be loaded"),
        (cli.scenario / "scorer", "cls.predictions"),
    ):
        message = refused(cli.run(overrides=(f"{MODEL}={folder}",)))
        assert says(message, folder, fact, "save_pretrained")


def test_an_adapter_without_its_package(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    message = refused(cli.run(overrides=(f"{ATTACKER}.lora={{rank: 2}}",)))
    assert says(message, "peft", "pip install")


def test_a_run_directory_that_cannot_be_made_is_refused(cli: CommandLine) -> None:
    file = cli.write("file", "")
    message = refused(cli.run("--runs-dir", f"{file}/runs"))
    assert says(message, f"{file}/runs/one", "Not a directory", "--runs-dir")
    (cli.folder / "runs" / "one").mkdir(parents=True)
    assert says(refused(cli.run()), "'one'", "nip-astra resume runs/one", "--run-id")
