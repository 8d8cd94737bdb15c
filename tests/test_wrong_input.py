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


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("ast_dpo.beta=${traning.lr}", ["ast_dpo.beta (from --set)", "'traning.lr'"]),
        (
            "ast_chat.scorer._type=clasifier",
            ["ast_chat.scorer._type", "'clasifier'", "'classifier'?", "detoxify", "--set"],
        ),
        ("ast_chat.attacker.language_model.model=./none", ["'./none'", "not exist", ".gguf"]),
        (f"{MODEL}=./none", ["'./none'", "not exist", ".gguf", "hub id"]),
        (f"{MODEL}=package://no_such_package/x", ["no_such_package/x'", "pip install"]),
        (f"{MODEL}=package://no.such/x", ["no.such/x'", "package", "pip install"]),
        (f"{MODEL}=hub://a/b", ["hub://", "'hub://a/b'"]),
        ("ast_chat.attacker.system_prompt=hello", ["template", "'system'", "system_prompt"]),
        ("ast_chat.scorer.model=./none", ["'./none'", "not exist", "folder"]),
        ("ast_chat.scorer.label=rud", ["'rud'", "'rude'?", "civil, rude"]),
        (
            "ast_chat.prompts.dev=scenario://none.txt",
            ["'scenario://none.txt'", "No such file", ".csv"],
        ),
        ("ast_chat.target.max_new_tokens=96", ["target's window of 96", " 0 ", "turn of 96"]),
    ],
)
def test_a_parameter_of_a_missing_part_is_reported(
    cli: CommandLine, override: str, words: list[str]
) -> None:
    assert says(refused(cli.run(overrides=(override,))), *words)


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ("\n\n", ["mine.txt", "has no prompts"]),
        ("good day\nhello\nfine thanks\n", ["train and test", "2", "'good day'"]),
        (
            f"good mat\n{'hello ' * 100}\n",
            ["prompt 2", "'hello hello", "window of 96", "90", "max_new_tokens"],
        ),
    ],
    ids=["none", "of the train split too", "too long"],
)
def test_unplayable_prompts_are_reported(cli: CommandLine, prompts: str, words: list[str]) -> None:
    path = cli.write("mine.txt", prompts)
    assert says(refused(cli.run(overrides=(f"ast_chat.prompts.test={path}",))), *words)


def test_an_unknown_kind_of_scenario(cli: CommandLine) -> None:
    (cli.folder / "mine").mkdir()
    cli.write("mine/scenario.yaml", "kind: ast_caht\n")
    message = refused(cli("--trainer", "ast_dpo", "--scenario", "mine"))
    assert says(message, "scenario kind", "'ast_caht'", "'ast_chat'?")
    cli.write("mine/scenario.yaml", "training: {lr: 1e-3}\n")
    message = refused(cli("--trainer", "ast_dpo", "--scenario", "mine"))
    assert says(message, "scenario.yaml", "`kind`", "ast_chat, ")


@pytest.mark.parametrize(
    ("override", "facts"),
    [
        ("training.lr=.nan", ["training.lr: "]),
        ("training.lr=.inf", ["training.lr: "]),
        ("training=3", ["training: ", "group"]),
        ("ast_chat.scorer=3", ["ast_chat.scorer: ", "_type"]),
        ("ast_chat.prompts.train=null", ["ast_chat.prompts.train: "]),
        ("ast_chat.planted_failures=[{name: x, probe: (}]", ["planted_failures.0.probe: "]),
        (
            "ast_chat.planted_failures=[{name: x, probe: a}, {name: x, probe: b}]",
            ["ast_chat.planted_failures: ", "['x']"],
        ),
        ("ast_chat.attacker.min_new_tokens=7", ["min_new_tokens: ", "max_new_tokens", "6"]),
        ("plugins=mine.py", ["plugins: "]),
    ],
)
def test_a_wrong_value_is_reported_with_its_path_and_source(
    cli: CommandLine, override: str, facts: list[str]
) -> None:
    assert says(refused(cli.run(overrides=(override,))), "1 parameter", "(from --set)", *facts)


def test_several_faults_are_reported_at_once_each_with_its_source(cli: CommandLine) -> None:
    path = cli.write(
        "mine.yaml",
        f"""
        trainer: ast_dpo
        scenario: {cli.scenario}
        training: {{lr: "1e-5", minibatch_size: true, optimiser: sgd}}
        ast_dpo: {{beta: 0}}
        """,
    )
    result = cli("--parameters", path, "--set", "ast_chat.tree_widht=3", "--set", "seed=-1")
    message = refused(result)
    of_file = ("training.lr: ", "training.minibatch_size: ", "'training.optimizer'?", "beta: ")
    assert says(message, "6 parameters", *of_file, "'ast_chat.tree_width'?", "seed: ")
    assert (message.count(f"(from {path})"), message.count("(from --set)")) == (4, 2)
    assert not (cli.folder / "runs").exists()


def test_a_parameter_may_refer_to_a_parameter_of_the_scenario(cli: CommandLine) -> None:
    experiment = ("--trainer", "ast_dpo", "--scenario", str(cli.scenario))
    result = cli.ok("show", *experiment, "--set", "ast_dpo.beta=${training.lr}")
    assert "0.003" in next(line for line in result.out.splitlines() if "ast_dpo.beta" in line)


def test_a_gpu_where_there_is_none(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert says(refused(cli.run("--device", "cuda")), "'cuda'", "no GPU", "--device cpu")


# ---- models


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


@pytest.mark.parametrize("targets", ["[q_prj]", "[v_proj, q_prj]", "q_prj"])
def test_an_adapter_on_a_layer_that_the_model_has_not(cli: CommandLine, targets: str) -> None:
    pytest.importorskip("peft")
    override = f"ast_chat.attacker.language_model.lora={{target_modules: {targets}}}"
    message = refused(cli.run(overrides=(override,)))
    assert says(message, "lora.target_modules", "'q_prj'", "'q_proj'?", "down_proj, gate_proj")


def test_an_adapter_without_its_package(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    message = refused(cli.run(overrides=("ast_chat.attacker.language_model.lora={rank: 2}",)))
    assert says(message, "peft", "pip install")


# ---- the run directory


def test_a_run_directory_that_cannot_be_made_is_refused(cli: CommandLine) -> None:
    file = cli.write("file", "")
    message = refused(cli.run("--runs-dir", f"{file}/runs"))
    assert says(message, f"{file}/runs/one", "Not a directory", "--runs-dir")
    (cli.folder / "runs" / "one").mkdir(parents=True)
    assert says(refused(cli.run()), "'one'", "nip-astra resume runs/one", "--run-id")
