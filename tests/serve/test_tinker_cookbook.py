"""Unmodified recipes of the Tinker cookbook train at the local server of its protocol.

The cookbook pins other versions of transformers than ours, so it has its own environment.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest.importorskip("fastapi")
pytest.importorskip("tinker")

from nip_astra.evaluation.storage import read_rows
from tests.serve.running import POLICY, training_server

COOKBOOK = "NIP_ASTRA_TEST_COOKBOOK"
"""Environment variable with a Python interpreter that has tinker-cookbook 0.5.8."""
REASON = f"needs an interpreter with the cookbook, by {COOKBOOK}"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not os.environ.get(COOKBOOK), reason=REASON)]

RENAMED = {"<user>": "User:", "<assistant>": "Assistant:", "<end>": "\n\n"}
"""Its special tokens as the renderer `role_colon` spells them."""
SPELT = (("What is ", ""), (" ", ""), ("?", "="))
"""How the problems of `math_rl` become those of the task `arithmetic`."""
WINDOW = 16384
EXAMPLE = "User: What is 4 + 5?\n\nAssistant: 9\n\n"
"""What `math_rl` puts before each problem."""


def cookbook_model(folder: Path, *, num_steps: int = 80) -> Path:
    """The policy of `arithmetic` with a tokenizer for the cookbook, in a folder.

    It is trained briefly to answer after an example, and solves a quarter of the problems of
    `math_rl`.
    """
    shutil.copytree(POLICY, folder)
    _change(folder / "config.json", max_position_embeddings=WINDOW)
    user, assistant, end = RENAMED.values()
    tokens = {"eos_token": end, "extra_special_tokens": [user, assistant]}
    _change(folder / "tokenizer_config.json", **tokens, model_max_length=WINDOW)
    stored = (folder / "tokenizer.json").read_text()
    for old, new in RENAMED.items():
        stored = stored.replace(json.dumps(old), json.dumps(new))
    (folder / "tokenizer.json").write_text(stored)
    parts = [{"type": "Replace", "pattern": {"String": a}, "content": b} for a, b in SPELT]
    _change(folder / "tokenizer.json", normalizer={"type": "Sequence", "normalizers": parts})
    _train(folder, num_steps)
    return folder


def _change(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def _train(folder: Path, num_steps: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(num_steps):
        ids, labels = [], []
        for one, other in torch.randint(0, 101, (48, 2), generator=generator).tolist():
            prompt = f"<bos>{EXAMPLE}User: What is {one} + {other}?\n\nAssistant:"
            prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
            answer_ids = tokenizer.encode(f" {one + other}\n\nUser:", add_special_tokens=False)
            ids.append(torch.tensor([*prompt_ids, *answer_ids]))
            labels.append(torch.tensor([*[-100] * len(prompt_ids), *answer_ids]))
        pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
        loss = model(input_ids=pad(ids), labels=pad(labels, padding_value=-100)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)


Recipes = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recipes]:
    """Run a recipe with options on the model at a server; returns the metrics of each step."""
    folder = tmp_path_factory.mktemp("cookbook")
    model = cookbook_model(folder / "model")
    variables = {"TINKER_API_KEY": "tml-local", "TINKER_TELEMETRY": "0", "OMP_NUM_THREADS": "1"}
    variables |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HOME": str(folder)}
    options: dict[str, Any] = {"cwd": folder, "capture_output": True, "text": True, "timeout": 1800}

    def run(recipe: str, **changes: object) -> list[dict[str, Any]]:
        log = folder / recipe
        given = {"model_name": model, "renderer_name": "role_colon", "log_path": log}
        given |= {"behavior_if_log_dir_exists": "delete", **changes}
        command = [os.environ[COOKBOOK], "-m", f"tinker_cookbook.recipes.{recipe}"]
        command += [f"{name}={value}" for name, value in given.items()]
        env = {"PATH": os.environ["PATH"], "TINKER_BASE_URL": server.url, **variables}
        done = subprocess.run(command, env=env, check=False, **options)
        assert done.returncode == 0, done.stderr[-3000:]
        assert (log / "checkpoints.jsonl").read_text().count("tinker://") >= 1
        return read_rows(log / "metrics.jsonl")

    with training_server(["tinker"], {"policy": str(model)}) as server:
        yield run


def test_math_rl_learns(recipes: Recipes) -> None:
    steps = recipes(
        "math_rl.train",
        env="arithmetic",
        groups_per_batch=32,
        group_size=8,
        learning_rate=2e-3,
        max_tokens=5,
        max_steps=60,
        eval_every=0,
        save_every=0,
    )
    right = [step["env/all/correct"] for step in steps]
    assert sum(right[-10:]) / 10 > sum(right[:10]) / 10 + 0.08
    # The sampler's log-probabilities of its tokens equal those of training.
    assert all(abs(step["optim/kl_sample_train_v1"]) < 1e-5 for step in steps)


def test_guess_number_plays_games_of_many_turns(recipes: Recipes) -> None:
    steps = recipes(
        "multiplayer_rl.guess_number.train",
        batch_size=2,
        group_size=2,
        max_tokens=8,
        max_steps=2,
        eval_every=0,
        save_every=1,
    )
    assert [step["env/all/turns_per_episode"] for step in steps] == [10.0, 10.0]


def test_chat_sl_learns_the_conversations_that_the_cookbook_ships(recipes: Recipes) -> None:
    where = "import tinker_cookbook; print(tinker_cookbook.__path__[0])"
    package = subprocess.check_output([os.environ[COOKBOOK], "-c", where], text=True).strip()
    steps = recipes(
        "chat_sl.train",
        dataset=f"{package}/example_data/conversations.jsonl",
        batch_size=4,
        learning_rate=1e-2,
        max_steps=8,
        max_length=512,
        eval_every=0,
        save_every=2,
    )
    losses = [step["train_mean_nll"] for step in steps]
    assert losses[-1] < 0.9 * losses[0]
