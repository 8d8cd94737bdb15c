"""User mistakes end with exit code 2, without a traceback, and with at most two lines."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest

from tests.kit.command_line import CommandLine, plugins_forgotten_after, refused
from tests.kit.documents import ROOT
from tests.kit.messages import says

MOST_LINES, MOST_CHARACTERS = 2, 300
FILES = {
    "nothing.py": "x = 1\n",
    "broken.py": "def f(:\n",
    "raising.py": "raise ValueError('no such thing')\n",
    "list.yaml": "[1, 2]\n",
    "broken.yaml": "a: [1\n",
    "cyclic.yaml": "extends: cyclic.yaml\n",
    "unknown.yaml": "trainer: ast_dpo\nlearning_rate: 1\n",
    "sweep.yaml": "trainers: [ast_dpo]\ngrid: {training.lr: [fast]}\n",
    "binary.yaml": "\x00\x01",
    "data.jsonl": "not json\n",
    "folder/readme.txt": "no run",
    "runs/mine/hyper_parameters.yaml": "trainer: ast_dpo\n",
    "runs/mine/results.json": "{}",
}
SHOW = "show --trainer ast_dpo --set"
MISTAKES = {
    # names of all kinds; each with the facts required in the message
    "--seed 1": "--trainer",
    "--trainr ast_dpo": "--trainer",
    "--trainer ast_dop": "'ast_dpo'",
    "--trainer ast_dpo --scenario poket_chat": "'pocket_chat'",
    "--trainer ast_dpo --scenario ./nowhere": "./nowhere",
    "--trainer ast_dpo --scenario arithmetic": "pocket_chat",
    "train --trainer ast_dpo": "nip-astra run",
    "eval runs/mine": "nip-astra evaluate",
    "evalute runs/mine": "'evaluate'",
    "foo": "evaluate",
    "list trainer_s": "'trainers'",
    "show --explain qqqq": "'qqqq'",
    "schema --trainer nix": "'nix'",
    "sweep --trainer nix --dry-run": "'nix'",
    "sweep --trainer ast_dpo --metric nix --dry-run": "failure_rate",
    "export runs/mine --format cvs": "'csv'",
    "check-resume --trainer nix": "'nix'",
    "dataset download mnits": "'mnist'",
    "dataset creat x": "'create'",
    "dataset create x.safetensors --set num_trian=3": "'num_train'",
    # parameters and settings
    f"{SHOW} training.learning_rate=1e-4": "lr",
    "--trainer ast_dpo --settings num_checkpoints_kept=0": "num_checkpoints_kept",
    "--trainer ast_dpo --settings checkpoint_period": "--settings",
    f"{SHOW} learning_rate=1e-4": "training.lr",
    f"{SHOW} training.max_steps=10": "training.num_iterations",
    f"{SHOW} training.per_device_train_batch_size=10": "training.minibatch_size",
    f"{SHOW} traning.lr=1": "'training'",
    f"{SHOW} training.lr=fast": '"fast"',
    f"{SHOW} training.lr=-1": "greater than 0",
    f"{SHOW} training.num_iterations=1.5": "whole",
    f"{SHOW} training.lr": "training.lr",
    f"{SHOW} =3": "'=3'",
    f"{SHOW} a..b=3": "'a..b=3'",
    f"{SHOW} scenario=3": "scenario",
    f"{SHOW} ast_dpo.min_chosen_score=1.5": "min_chosen_score",
    f"{SHOW} training.optimizer=AdamX": "'adamax'",
    f"{SHOW} ast_chat.tree_width=100000": "tree_width=100000",
    f"{SHOW} ast_chat.scorer._type=detoxfy": "'detoxify'",
    f"{SHOW} ppo.clip_low=0.1": "vanilla_ppo",
    f"{SHOW} ast_dpo.beta=null": "ast_dpo.beta",
    f"{SHOW} seed=abc": "seed",
    "--trainer ast_dpo --seed x": "--seed",
    "--trainer ast_dpo --lr 1": "--set training.lr",
    "--trainer ast_dpo --config unknown.yaml": "--parameters",
    "--trainer ast_dpo training.lr=1": "--set training.lr",
    "--trainer ast_dpo --settings checkpont_period=3": "'checkpoint_period'",
    "--trainer ast_dpo --settings checkpoint_period=often": '"often"',
    "--trainer ast_dpo --device gpu": "cuda",
    "--trainer ast_dpo --track wandbb": "'wandb'",
    "--trainer ast_dpo --wandb on": "offline",
    "--trainer": "--trainer",
    "--trainer ast_dpo --run-id ../x": "'../x'",
    "resume runs/mine --set training.lr=1": "stay",
    # files and folders
    "--parameters nowhere.yaml": "nowhere.yaml",
    "--parameters list.yaml": "list",
    "--parameters broken.yaml": "broken.yaml, line 2",
    "--parameters cyclic.yaml": "cyclic.yaml",
    "--parameters unknown.yaml": "training.lr",
    "--parameters binary.yaml": "binary.yaml",
    "--parameters folder": "folder",
    "resume nowhere": "'nowhere'",
    "evaluate": "RUN",
    "evaluate nowhere": "'nowhere'",
    "evaluate folder": "config.json",
    "evaluate runs/mine --fail-if 'x >'": "'x >'",
    "score folder --scorer detoxify": "folder",
    "compare folder": "two",
    "compare runs/mine runs/mine": "twice",
    "compare nowhere other": "'nowhere'",
    "report folder": "results.json",
    "export folder --format csv": "folder",
    "analyse folder": "folder",
    "compare-dumps folder nowhere": "dump_period",
    "sweep": "--trainer",
    "sweep nowhere.yaml": "nowhere.yaml",
    "sweep sweep.yaml --dry-run": '"fast"',
    "sweep --trainer ast_dpo --seeds a..b --dry-run": "0..4",
    # plug-ins, tasks, stress tests
    "--trainer mine --plugin nothing.py": "nothing.py",
    "--trainer mine --plugin broken.py": "line 1",
    "--trainer mine --plugin raising.py": "no such thing",
    "--trainer mine --plugin nowhere.py": "nowhere.py",
    "task --data data.jsonl --reward exact": "--model",
    "stress": "--target",
    "stress --target ./nowhere --scorer detoxify": "./nowhere",
}


def test_no_mistake_ends_in_a_traceback_or_in_a_long_message(cli: CommandLine) -> None:
    assert len(MISTAKES) >= 60
    for name, text in FILES.items():
        (cli.folder / name).parent.mkdir(parents=True, exist_ok=True)
        cli.write(name, text)
    wrong = []
    for command, fact in MISTAKES.items():
        with plugins_forgotten_after():
            result = cli(*shlex.split(command))
        lines = result.err.splitlines()
        # The list of all names, after an unknown name, may take the lines that it needs.
        own = re.sub(r"Known [\w ]+: [^.]*\.|Known here: [^.]*\.", "", result.err)
        is_short = 0 < len(lines) <= MOST_LINES and len(own) <= MOST_CHARACTERS
        is_reported = fact in result.err and "error: " in lines[0].lower()
        if result.code != 2 or not is_short or not is_reported or "Traceback" in result.err:
            wrong.append((command, fact, result.code, result.err))
    assert wrong == []


def test_without_its_packages_the_program_names_the_packages_to_install() -> None:
    command = [sys.executable, "-I", "-S", str(ROOT / "run.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert re.search(r"'\w+' is missing.*pip install", done.stderr)


@pytest.mark.parametrize("start", ["run.py", "nip_astra/__main__.py"])
def test_ctrl_c_while_the_program_loads_ends_it_without_a_traceback(start: str) -> None:
    code = f"""
import runpy, sys
class CtrlC:
    def find_spec(self, name, *_):
        if name == "typer":
            raise KeyboardInterrupt
sys.meta_path.insert(0, CtrlC())
runpy.run_path({start!r}, run_name="__main__")
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (130, "")


# ---- parameters that are wrong for the models and prompts of a scenario

MODEL = "ast_chat.target.language_model.model"
ATTACKER = "ast_chat.attacker.language_model"
VALUE = ["1 parameter", "(from --set)"]
"""Facts about a parameter with a wrong value."""


@pytest.mark.parametrize(
    ("override", "facts"),
    [
        ("ast_dpo.beta=${traning.lr}", ["ast_dpo.beta (from --set)", "'traning.lr'"]),
        ("ast_chat.scorer._type=clasifier", ["scorer._type", "'clasifier'", "'classifier'?"]),
        (f"{MODEL}=./none", ["'./none'", "not exist", ".gguf", "hub id"]),
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
        ("good day\nhello\nfine thanks\n", ["train and test", "2", "'good day'"]),
        (f"good mat\n{'hello ' * 100}\n", ["prompt 2", "'hello hello", "96", "90"]),
    ],
    ids=["of the train split too", "too long"],
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
