"""The small model that ships, made to read the prompts of the Tinker cookbook's renderers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.serve.running import POLICY

RENAMED = {"<user>": "User:", "<assistant>": "Assistant:", "<end>": "\n\n"}
"""Its special tokens as the renderer `role_colon` spells them."""
SPELT = (("What is ", ""), (" ", ""), ("?", "="))
"""How the problems of `math_rl` become those of the task `arithmetic`."""
WINDOW = 16384
EXAMPLE = "User: What is 4 + 5?\n\nAssistant: 9\n\n"
"""What `math_rl` puts before each problem."""


def cookbook_model(folder: Path, *, num_steps: int = 80) -> Path:
    """The policy of `arithmetic` with a tokenizer for the cookbook, in a folder.

    It is trained a little to answer after an example, which leaves it right on a quarter of the
    problems of `math_rl`.
    """
    shutil.copytree(POLICY, folder)
    _change(folder / "config.json", max_position_embeddings=WINDOW)
    renamed = list(RENAMED.values())
    _change(
        folder / "tokenizer_config.json",
        eos_token=RENAMED["<end>"],
        extra_special_tokens=renamed[:2],
        model_max_length=WINDOW,
    )
    told = json.loads((folder / "tokenizer.json").read_text())
    for token in told["added_tokens"]:
        token["content"] = RENAMED.get(token["content"], token["content"])
    vocabulary = {RENAMED.get(name, name): place for name, place in told["model"]["vocab"].items()}
    parts = [{"type": "Replace", "pattern": {"String": a}, "content": b} for a, b in SPELT]
    _change(
        folder / "tokenizer.json",
        added_tokens=told["added_tokens"],
        model={**told["model"], "vocab": vocabulary},
        normalizer={"type": "Sequence", "normalizers": parts},
    )
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
            asked = tokenizer.encode(prompt, add_special_tokens=False)
            said = tokenizer.encode(f" {one + other}\n\nUser:", add_special_tokens=False)
            ids.append(torch.tensor([*asked, *said]))
            labels.append(torch.tensor([*[-100] * len(asked), *said]))
        pad = torch.nn.utils.rnn.pad_sequence
        loss = model(
            input_ids=pad(ids, batch_first=True),
            labels=pad(labels, batch_first=True, padding_value=-100),
        ).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
