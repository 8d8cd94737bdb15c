"""User mistakes end with exit code 2, without a traceback, and with at most two lines."""

from __future__ import annotations

import os
import random
import re
import shlex
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nip_astra import plugins
from nip_astra.errors import RunDirectoryError, ScorerTimeoutError
from nip_astra.resume_check import in_a_fork
from nip_astra.scorers.base import SCORERS, Scorer
from nip_astra.tracking.run_directory import RunDirectory
from tests.kit.command_line import CommandLine, CommandResult, plugins_forgotten_after, refused
from tests.kit.documents import ROOT
from tests.kit.messages import says
from tests.report.runs import failing, write_run

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
    "--trainer ast_dpo --scenario arithmetic": "pocket_chat",
    "train --trainer ast_dpo": "nip-astra run",
    "evalute runs/mine": "'evaluate'",
    "list trainer_s": "'trainers'",
    "show --explain qqqq": "'qqqq'",
    "sweep --trainer nix --dry-run": "'nix'",
    "sweep --trainer ast_dpo --metric nix --dry-run": "failure_rate",
    "export runs/mine --format cvs": "'csv'",
    "dataset download mnits": "'mnist'",
    "dataset creat x": "'create'",
    "dataset create x.safetensors --set num_trian=3": "'num_train'",
    # parameters and settings
    f"{SHOW} training.learning_rate=1e-4": "lr",
    "--trainer ast_dpo --settings checkpoint_period": "--settings",
    f"{SHOW} learning_rate=1e-4": "training.lr",
    f"{SHOW} traning.lr=1": "'training'",
    f"{SHOW} training.lr=fast": '"fast"',
    f"{SHOW} training.lr": "training.lr",
    f"{SHOW} a..b=3": "'a..b=3'",
    f"{SHOW} scenario=3": "scenario",
    f"{SHOW} training.optimizer=AdamX": "'adamax'",
    f"{SHOW} ppo.clip_low=0.1": "vanilla_ppo",
    "--trainer ast_dpo --seed x": "--seed",
    "--trainer ast_dpo --lr 1": "--set training.lr",
    "--trainer ast_dpo --config unknown.yaml": "--parameters",
    "--trainer ast_dpo training.lr=1": "--set training.lr",
    "--trainer ast_dpo --settings checkpont_period=3": "'checkpoint_period'",
    "--trainer ast_dpo --device gpu": "cuda",
    "--trainer ast_dpo --track wandbb": "'wandb'",
    "--trainer": "--trainer",
    "--trainer ast_dpo --run-id ../x": "'../x'",
    "resume runs/mine --set training.lr=1": "resumed",
    # files and folders
    "--parameters nowhere.yaml": "nowhere.yaml",
    "--parameters list.yaml": "list",
    "--parameters broken.yaml": "broken.yaml, line 2",
    "--parameters cyclic.yaml": "cyclic.yaml",
    "--parameters unknown.yaml": "training.lr",
    "--parameters folder": "folder",
    "resume nowhere": "'nowhere'",
    "evaluate": "RUN",
    "evaluate nowhere": "'nowhere'",
    "evaluate folder": "config.json",
    "evaluate runs/mine --fail-if 'x >'": "'x >'",
    "score folder --scorer detoxify": "folder",
    "compare folder": "two",
    "compare runs/mine runs/mine": "twice",
    "report folder": "results.json",
    "analyse folder": "folder",
    "compare-dumps folder nowhere": "no run or file 'nowhere'",
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
        ("ast_chat.planted_failures=[{name: x, probe: (}]", [*VALUE, "planted_failures.0.probe: "]),
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


# ---- endless, broken or impossibly large input

DEEP = {"lists": "a: " + "[" * 100_000, "groups": "{a: " * 50_000}
"""YAML that is nested without end."""


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        *((("show", "--parameters", f"{one}.yaml"), (f"{one}.yaml", "too deep")) for one in DEEP),
        (("show", "--parameters", "/dev/zero"), ("/dev/zero",)),
        ((*SHOW.split(), "training.lr=" + "[" * 5_000), ("training.lr", "YAML")),
        *(((*SHOW.split(), one), (one,)) for one in ("training[lr]=1", "training[lr=1")),
        ((*SHOW.split(), "training.lr]=1"), ("training.lr]=1",)),
        ((*SHOW.split(), "training.lr=1e30"), ("training.lr: ", "at most 100")),
        (("show", "--trainer", "vanilla_ppo", "--set", "rl.lr=1e30"), ("rl.lr: ", "at most 100")),
        (("show", "--trainer", "solo_agent", "--set", "solo_agent.lr=1e30"), ("solo_agent.lr: ",)),
        (("--trainer", "ast_dpo", "--num-threads", "1000000"), ("num_threads: ", "at most")),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_input_without_end_or_of_impossible_size_is_refused(
    cli: CommandLine, arguments: tuple[str, ...], facts: tuple[str, ...]
) -> None:
    for name, text in DEEP.items():
        cli.write(f"{name}.yaml", text)
    assert says(refused(cli(*arguments)), *facts)


@pytest.mark.parametrize(
    "overrides",
    [
        ("ast_chat.tree_width=1000000000",),
        ("ast_chat.tree_depth=1000000000",),
        ("ast_chat.tree_width=1", "ast_chat.tree_depth=1000000000"),
        ("ast_chat.evaluation.num_episodes=1000000000",),
        ("training.num_episodes_per_experience=1000000000",),
    ],
)
def test_sizes_that_no_memory_holds(cli: CommandLine, overrides: tuple[str, ...]) -> None:
    started = time.monotonic()
    refused(cli.run(overrides=overrides))
    assert time.monotonic() - started < 30
    assert not (cli.folder / "runs" / "one").exists()


def test_a_runs_folder_whose_name_is_no_text(tmp_path: Path) -> None:
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/runs\xff")
    with pytest.raises(RunDirectoryError, match=r"UTF-8.*--runs-dir"):
        RunDirectory.create(folder, "one")


def test_an_export_of_half_a_surrogate_pair(cli: CommandLine) -> None:
    rows = [failing("b \ud800", node=0, parent=-1)]
    run = write_run(cli.folder / "one", tables={"evaluation": rows})
    for form in ("csv", "jsonl", "hitlog"):
        cli.ok("export", str(run), "--format", form)


def test_a_closed_standard_output_is_no_traceback() -> None:
    command = f"{sys.executable} run.py show --help >&-"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    assert "Exception ignored" not in done.stderr


class Hanging(Scorer):
    """Never answers."""

    calls = 0

    def _score(self, texts: object) -> list[float]:
        type(self).calls += 1
        time.sleep(60)
        return []


@pytest.mark.parametrize("on_failure", ["stop", "skip"])
def test_a_scorer_that_hangs_has_a_time_limit(on_failure: str) -> None:
    parameters = Hanging.Parameters(timeout_seconds=0.2, on_failure=on_failure)
    scorer = Hanging(parameters, device=torch.device("cpu"))
    Hanging.calls = 0
    started = time.monotonic()
    if on_failure == "stop":
        with pytest.raises(ScorerTimeoutError, match=r"timeout_seconds=0\.2"):
            scorer.score(["a", "b"])
    else:
        assert scorer.score(["a", "b"]).isnan().all()
    assert time.monotonic() - started < 10
    assert Hanging.calls == 1


VALUES = (
    *("\N{SUPERSCRIPT TWO}", "1e400", ".nan", "-1", "1" + "0" * 30, "9" * 5000, "true", "0", "1.5"),
    *("[]", "{}", "''", '"\\0"', "null", "../../x", "hub://x", "x" * 5000, "${a.b}", "[1,["),
    *("{a: 1", "{_type: nope}", "{_type: openai}", "[[[[1]]]]", "scenario://../x"),
    *("package://no.such/x", "\ud800"),
)
SERVICE = "remote_api_grpo.train_service"
SWEEP = "sweep --dry-run --trainer ast_dpo"
INPUTS = {
    "--dry-run --trainer self_hosted_grpo --set": (
        "training.num_iterations training.minibatch_size training.lr training.optimizer task.task "
        "task.task._type task.max_turns task.evaluation.num_problems task.num_rollout_parts "
        "task.policy.language_model.model task.policy.max_new_tokens self_hosted_grpo.group_size "
        "self_hosted_grpo.max_staleness seed scenario nothing"
    ),
    "--dry-run --trainer pure_text_ei --set": (
        "text_rl.num_iterations text_rl.rollouts_per_iteration text_rl.fine_tune_method "
        "secret_word.num_test secret_word.agents.default.model secret_word.agents.verifier "
        "secret_word.agents.default.max_tokens nip.max_message_rounds interaction_protocol "
        "protocol_common.prover_reward pure_text_ei base_run.run plugins"
    ),
    "show --trainer remote_api_grpo --set": (
        f"{SERVICE}.backend {SERVICE}.base_url {SERVICE}.model {SERVICE}.token_variable "
        f"{SERVICE}.retry_timeout_seconds {SERVICE}.nothing"
    ),
    SWEEP: "--seeds --shard --scenario --objective --metric --num-trials",
    f"{SWEEP} --set": "training.lr seed",
    f"{SWEEP} --search": "training.lr",
    f"{SWEEP} --settings": "num_threads",
    "sweep --dry-run": "--trainer",
}
"""The start of a command, and names of parameters or options."""


def bad_inputs() -> list[Any]:
    """Arguments of 100 inputs, every ninth for a fast test; the same for every call."""
    commands = []
    for head, names in INPUTS.items():
        for name, value in product(names.split(), VALUES):
            words = [name, value] if name.startswith("--") else [f"{name}={value}"]
            commands.append((f"{head.split()[0]} {name} {value[:20]!a}", (*head.split(), *words)))
    return [
        pytest.param(words, id=name, marks=[pytest.mark.slow] if number % 9 else [])
        for number, (name, words) in enumerate(random.Random(31).sample(commands, 100))
    ]


@pytest.mark.parametrize("words", bad_inputs())
def test_a_value_that_type_range_or_place_does_not_allow_is_refused(
    cli: CommandLine, words: tuple[str, ...]
) -> None:
    """An input that is valid by chance may run; none may end in a traceback."""
    with plugins_forgotten_after():
        result = cli(*words)
    assert result.code in (0, 2), result
    assert "Traceback" not in result.err
    assert result.code == 0 or result.err.startswith(("error: ", "Usage: ")), result.err


# ---- failing plug-ins

SCORER = """
    from nip_astra.scorers.base import Scorer, register_scorer

    @register_scorer("mine")
    class Mine(Scorer):
        def _score(self, texts):
            {body}
    """
TRAINER = """
    from nip_astra.trainers.ast.dpo import AstDpoTrainer
    from nip_astra.trainers.registry import register_trainer

    @register_trainer("my_trainer")
    class MyTrainer(AstDpoTrainer):
    """


def scorer_of(
    cli: CommandLine, body: str, *overrides: str, options: tuple[str, ...] = ()
) -> CommandResult:
    path = cli.write("mine.py", SCORER.format(body=body))
    overrides = ("ast_chat.scorer={_type: mine}", *overrides)
    return cli.run("--plugin", path, *options, overrides=overrides)


def forget_scorer() -> None:
    """Another process would read the file again."""
    SCORERS.forget("mine")
    plugins._LOADED.clear()


@pytest.mark.parametrize(
    ("body", "facts"),
    [
        ("raise ValueError('out of words')", ["'mine'", "ValueError: out of words"]),
        ("return [float('nan') for text in texts]", ["'mine'", "nan"]),
        ("return [0.5]", ["'mine'", "1 score", "16 texts"]),
        ("import sys; sys.exit(0)", ["sys.exit(0)"]),
    ],
)
def test_a_scorer_that_fails_ends_a_run_which_resumes_once_it_is_corrected(
    cli: CommandLine, body: str, facts: list[str]
) -> None:
    run = cli.folder / "runs" / "one"
    refused(scorer_of(cli, body, options=("--dry-run",)))
    forget_scorer()
    assert says(refused(scorer_of(cli, body)), *facts)
    assert says((run / "log.txt").read_text(), "ERROR", *facts)
    forget_scorer()
    cli.write("mine.py", SCORER.format(body="return [0.5 for text in texts]"))
    cli.ok("resume", "runs/one")
    assert (run / "results.json").is_file()


def test_a_collapse_of_the_attacker_is_reported(cli: CommandLine) -> None:
    result = scorer_of(
        cli,
        "return [0.5 for text in texts]",
        "ast_chat.attacker.temperature=0",
        "ast_chat.target.temperature=0",
        "ast_chat.evaluation.num_episodes=12",
    )
    assert result.code == 0, result.err
    hints = ("training.num_episodes_per_experience", "training.lr")
    assert says(" ".join(result.out.split()), "warning: the attacker has collapsed", *hints)


@pytest.mark.parametrize("override", ["ast_chat.tree_width=1", "ast_dpo.min_reward_difference=99"])
def test_a_run_without_anything_to_learn_from_reports_this(cli: CommandLine, override: str) -> None:
    result = cli.run(overrides=(override,))
    assert result.code == 0, result.err
    assert says(" ".join(result.out.split()), "warning: nothing was learned", "tree_width")
    assert "nan" not in result.err
    assert "loss=nothing to learn from" in result.err


def test_a_trainer_of_another_family_is_refused_with_scenarios_that_it_trains_on(
    cli: CommandLine,
) -> None:
    for trainer, scenario, shipped in (
        ("pure_text_ei", "pocket_chat", "secret_word"),
        ("self_hosted_grpo", "secret_word", "countdown"),
        ("vanilla_ppo", "secret_word", "graph_isomorphism"),
    ):
        message = refused(cli.run("--trainer", trainer, "--scenario", scenario))
        assert says(message, repr(trainer), repr(scenario), shipped)
        assert "pocket_chat_api" not in message
    path = cli.write("mine.py", TRAINER + "\n        scenario_kinds = ('other', 'third')\n")
    message = refused(cli.run("--plugin", path, "--trainer", "my_trainer"))
    assert says(message, "'my_trainer'", cli.scenario, "'ast_chat'", "other, third")


def test_a_loss_that_is_not_a_number(cli: CommandLine) -> None:
    path = cli.write(
        "mine.py",
        TRAINER
        + """
        num_calls = 0

        def step(self, batch):
            MyTrainer.num_calls += 1
            output = super().step(batch)
            if MyTrainer.num_calls < 3:
                return output
            return output._replace(loss=output.loss * float("nan"))
    """,
    )
    result = cli.run(
        *("--plugin", path, "--trainer", "my_trainer"),
        overrides=("training.minibatch_size=1", "training.num_episodes_per_experience=2"),
    )
    message = refused(result)
    assert says(message, "step 3", "iteration 1", "loss nan", "norm nan", "training.lr")
    checkpoints = cli.folder / "runs" / "one" / "checkpoints"
    latest = checkpoints / (checkpoints / "latest").read_text().strip()
    weights = load_file(latest / "attacker" / "model.safetensors")
    assert all(weight.isfinite().all() for weight in weights.values())


TASK = """
    import os, sys
    import nip_astra as na

    class Mine(na.Environment):
        def reset(self):
            return [na.Message("user", "1+1=")]

        def step(self, message):
            {body}

    @na.register_task("mine")
    class MyTask(na.Task):
        def environment(self, split, index):
            return Mine()
    """


@pytest.mark.parametrize(
    ("body", "fact"),
    [
        ("os._exit(0)", "os._exit(0)"),
        ("sys.exit(0)", "sys.exit(0)"),
        ("return na.Reaction(reward=float('nan'))", "step of Mine returned 'nan'"),
    ],
)
def test_an_environment_that_exits_or_rewards_with_nan_ends_the_run_with_an_error(
    cli: CommandLine, body: str, fact: str
) -> None:
    def run() -> None:
        result = cli(
            *("--plugin", cli.write("mine.py", TASK.format(body=body)), "--run-id", "one"),
            *("--trainer", "self_hosted_grpo", "--scenario", "arithmetic"),
            *("--set", "task.task={_type: mine}", "--set", "task.evaluation.num_problems=2"),
        )
        cli.write("refusal.txt", refused(result))

    # Otherwise the program's exit would end the tests, with 0.
    in_a_fork(run)
    assert fact in (cli.folder / "refusal.txt").read_text()
    assert fact in (cli.folder / "runs" / "one" / "log.txt").read_text()
