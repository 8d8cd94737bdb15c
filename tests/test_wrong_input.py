"""Wrong input, from the command line to the message: what was asked, what is wrong, what to do.

Plug-ins that fail are in `test_wrong_plugins.py`.
"""

from __future__ import annotations

import sys

import pytest
import torch

from nip_astra.parameters.content import scenario_names
from nip_astra.trainers.registry import TRAINERS
from tests.kit.command_line import CommandLine, refused
from tests.kit.messages import says

# ---- names


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seed", "1"], ["no trainer", "--trainer", "ast_dpo"]),
        (
            ["--trainer", "ast_dop"],
            ["'ast_dop'", "'ast_dpo'?", *TRAINERS.names(), "--plugin"],
        ),
        (
            ["--trainer", "ast_dpo", "--scenario", "poket_chat"],
            ["'poket_chat'", "'pocket_chat'?", *scenario_names(), "scenario.yaml"],
        ),
        (["--trainer", "ast_dpo", "--set", "scenario=3"], ["scenario", "3"]),
        (["--trainer", "ast_dpo", "--set", "nonsense"], ["'nonsense'", "--set"]),
        (["--trainer", "ast_dpo", "--set", "=3"], ["'=3'", "--set"]),
        (["--trainer", "ast_dpo", "--set", "a..b=3"], ["'a..b=3'", "--set"]),
    ],
)
def test_what_is_no_name_and_no_assignment_is_told(
    cli: CommandLine, arguments: list[str], words: list[str]
) -> None:
    assert says(refused(cli(*arguments)), *words)


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
def test_a_parameter_of_what_is_not_there_is_told(
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
def test_prompts_that_cannot_be_played_are_told(
    cli: CommandLine, prompts: str, words: list[str]
) -> None:
    path = cli.write("mine.txt", prompts)
    assert says(refused(cli.run(overrides=(f"ast_chat.prompts.test={path}",))), *words)


def test_an_unknown_kind_of_scenario(cli: CommandLine) -> None:
    (cli.folder / "mine").mkdir()
    cli.write("mine/scenario.yaml", "kind: ast_caht\n")
    message = refused(cli("--trainer", "ast_dpo", "--scenario", "mine"))
    assert "scenario kind" in message
    assert "'ast_caht'. Did you mean 'ast_chat'?" in message
    cli.write("mine/scenario.yaml", "training: {lr: 1e-3}\n")
    message = refused(cli("--trainer", "ast_dpo", "--scenario", "mine"))
    assert "scenario.yaml has no `kind`. Add one of: ast_chat, " in message


# ---- parameters


def test_several_faults_at_once_each_with_its_source(cli: CommandLine) -> None:
    path = cli.write(
        "mine.yaml",
        f"""
        trainer: ast_dpo
        scenario: {cli.scenario}
        training: {{lr: "1e-5", minibatch_size: true, optimiser: sgd}}
        ast_dpo: {{beta: 0}}
        """,
    )
    said = cli("--parameters", path, "--set", "ast_chat.tree_widht=3", "--set", "seed=-1")
    message = refused(said)
    assert message.startswith("6 parameters are wrong: ")
    for fault in (
        f'training.lr: must be a number, not text; given "1e-5" (from {path}). Write it without',
        "training.minibatch_size: must be a whole number, not true or false; given true "
        f"(from {path})",
        f'training.optimiser: unknown parameter; given "sgd" (from {path}). Did you mean',
        f"ast_dpo.beta: must be greater than 0; given 0 (from {path})",
        "ast_chat.tree_widht: unknown parameter; given 3 (from --set). Did you mean",
        "seed: must be ",
    ):
        assert fault in message
    assert "'optimizer'?" in message.replace("training.", "")
    assert "'tree_width'?" in message.replace("ast_chat.", "")
    assert not (cli.folder / "runs").exists()


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("training.lr=true", "training.lr: must be a number, not true or false; given true"),
        ("training.lr=.nan", "training.lr: must be "),
        ("training.lr=.inf", "training.lr: must be "),
        ("training.minibatch_size=2.5", "training.minibatch_size: must be a"),
        ("training.num_epochs=0", "training.num_epochs: must be "),
        ("training.optimizer=admw", "'adamw'?"),
        ("training=3", "training: must be a group of parameters"),
        ("ast_chat.scorer=3", "ast_chat.scorer: must be a group of parameters with a _type"),
        ("ast_chat.scorer.batch_size=0", "ast_chat.scorer.batch_size: must be "),
        ("ast_chat.prompts.train=null", "ast_chat.prompts.train: must be "),
        (
            "ast_chat.planted_failures=[{name: x, probe: (}]",
            "planted_failures.0.probe: is not a regu",
        ),
        (
            "ast_chat.planted_failures=[{name: x, probe: a}, {name: x, probe: b}]",
            "ast_chat.planted_failures: has duplicate names ['x']",
        ),
        (
            "ast_chat.attacker.min_new_tokens=7",
            "ast_chat.attacker.min_new_tokens: must be at most max_new_tokens, which is 6",
        ),
        ("ast_dpo.min_chosen_score=1.5", "ast_dpo.min_chosen_score: must be "),
        ("plugins=mine.py", "plugins: must be a"),
    ],
)
def test_one_fault_is_told_with_its_path_and_source(
    cli: CommandLine, override: str, fault: str
) -> None:
    message = refused(cli.run(overrides=(override,)))
    assert message.startswith("1 parameter is wrong: ")
    assert fault in message
    assert "(from --set)" in message


def test_a_parameter_may_refer_to_one_of_the_scenario(cli: CommandLine) -> None:
    said = cli("show", "--trainer", "ast_dpo", "--scenario", str(cli.scenario), "--set",
               "ast_dpo.beta=${training.lr}")  # fmt: skip
    assert said.code == 0, said.err
    assert "0.003" in next(line for line in said.out.splitlines() if "ast_dpo.beta" in line)


def test_a_parameter_file_that_is_missing_or_no_mapping(cli: CommandLine) -> None:
    message = refused(cli("--parameters", "none.yaml"))
    assert "the parameter file none.yaml" in message
    assert "no such file" in message
    for text in ("- a\n", "a: [\n"):
        message = refused(cli("--parameters", cli.write("mine.yaml", text)))
        assert "mine.yaml" in message
        assert "`name: value`" in message


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("--wandb", "sometimes"), "wandb: must be one of disabled, offline, online; given"),
        (("--device", "gpu"), "device: must be one of cpu, cuda, auto; given"),
        (("--num-threads", "0"), "num_threads: must be "),
    ],
)
def test_a_setting_that_is_none(cli: CommandLine, arguments: tuple[str, str], fault: str) -> None:
    message = refused(cli.run(*arguments))
    assert message.startswith("1 parameter is wrong: ")
    assert fault in message.replace("'", "").replace(" or ", ", ")
    assert arguments[1] in message
    assert not (cli.folder / "runs").exists()


def test_a_seed_that_is_no_number(cli: CommandLine) -> None:
    said = cli.run("--seed", "many")
    assert said.code == 2
    assert "--seed" in said.err
    assert "valid int" in said.err


def test_a_gpu_where_there_is_none(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert says(refused(cli.run("--device", "cuda")), "'cuda'", "no GPU", "--device cpu")


# ---- models and prompts


def test_a_folder_that_is_no_model(cli: CommandLine) -> None:
    (cli.folder / "empty").mkdir()
    message = refused(cli.run(overrides=("ast_chat.target.language_model.model=./empty",)))
    assert says(message, str(cli.folder / "empty"), "config.json", "save_pretrained")


def test_a_model_file_that_is_broken(cli: CommandLine) -> None:
    folder = cli.folder / "broken"
    folder.mkdir()
    for file in (cli.scenario / "target").iterdir():
        (folder / file.name).write_bytes(file.read_bytes()[:100])
    message = refused(cli.run(overrides=(f"ast_chat.target.language_model.model={folder}",)))
    assert f"of '{folder}' could not be loaded: " in message
    assert "Give a folder that save_pretrained wrote" in message


def test_a_classifier_is_no_language_model(cli: CommandLine) -> None:
    folder = cli.scenario / "scorer"
    message = refused(cli.run(overrides=(f"ast_chat.target.language_model.model={folder}",)))
    assert f"{folder} is not a complete language model: the weights cls.predictions" in message
    assert "Give a folder that save_pretrained wrote" in message


@pytest.mark.parametrize("targets", ["[q_prj]", "[v_proj, q_prj]", "q_prj"])
def test_an_adapter_on_a_layer_that_the_model_has_not(cli: CommandLine, targets: str) -> None:
    pytest.importorskip("peft")
    override = f"ast_chat.attacker.language_model.lora={{target_modules: {targets}}}"
    message = refused(cli.run(overrides=(override,)))
    assert message.startswith("lora.target_modules: the model has no linear layer 'q_prj'")
    assert "Did you mean 'q_proj'? Its layers: down_proj, gate_proj, k_proj, " in message


def test_an_adapter_without_its_package(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    message = refused(cli.run(overrides=("ast_chat.attacker.language_model.lora={rank: 2}",)))
    assert "needs the package peft. Run: pip install" in message


# ---- the run directory


def test_a_run_directory_that_cannot_be_made(cli: CommandLine) -> None:
    file = cli.write("file", "")
    message = refused(cli.run("--runs-dir", f"{file}/runs"))
    assert says(message, f"{file}/runs/one", "Not a directory", "--runs-dir")


def test_an_existing_run_id(cli: CommandLine) -> None:
    (cli.folder / "runs" / "one").mkdir(parents=True)
    message = refused(cli.run())
    assert says(message, "'one'", "exists", "nip-astra resume runs/one", "--run-id")


def test_a_run_id_that_is_no_name(cli: CommandLine) -> None:
    assert says(refused(cli.run("--run-id", "a/b")), "'a/b'", "name a folder")
