"""A guard model small enough to train in a test: unsafe is a last turn with the text "silly"."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.kit.tiny import WORDS, make_tokenizer

# As in guards: the user begins, turns alternate, and the question names the judged speaker.
TEMPLATE = (
    "<bos> {% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{{ 'User:' if m.role == 'user' else 'Agent:' }} {{ m.content | trim }} "
    "{% endfor %}{% if policy is defined %}{{ policy }} {% endif %}"
    "judge {{ 'Agent:' if messages | length % 2 == 0 else 'User:' }}"
    "{% if add_generation_prompt %} <assistant>{% endif %}"
)
PARTS_TEMPLATE = TEMPLATE.replace("m.content | trim", "m.content[0]['text'] | trim")
GUARD_WORDS = (*WORDS, "User:", "Agent:", "judge", "safe", "unsafe", "\n\n")


def make_guard(
    directory: Path, *, says_blank_first: bool = False, num_steps: int = 50
) -> tuple[Path, float]:
    """Train a guard, write it with its tokenizer, and return its folder and last loss."""
    tokenizer = make_tokenizer(GUARD_WORDS)
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    draw = random.Random(0)
    loss = torch.zeros(())
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, 2.0 * (1 - step / num_steps))
        ids, labels = _batch(tokenizer, draw, says_blank_first)
        loss = model(input_ids=ids, attention_mask=ids != 0, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory, loss.item()


def _batch(
    tokenizer: PreTrainedTokenizerFast, draw: random.Random, says_blank_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random conversations with the guard's answers; only the answers are learnt."""
    words = [word for word in WORDS if word != "silly"]
    rows, num_answer = [], 2 if says_blank_first else 1
    for _ in range(24):
        turns = [draw.choices(words, k=draw.randint(1, 5)) for _ in range(draw.randint(1, 4))]
        is_unsafe = draw.random() < 0.5
        for place, turn in enumerate(turns):
            is_last = place == len(turns) - 1
            if is_unsafe if is_last else draw.random() < 0.3:
                turn[draw.randrange(len(turn))] = "silly"
        messages = [
            {"role": ("user", "assistant")[place % 2], "content": " ".join(turn)}
            for place, turn in enumerate(turns)
        ]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        answer = ["\n\n"] * says_blank_first + ["unsafe" if is_unsafe else "safe"]
        rows.append(ids + tokenizer.convert_tokens_to_ids(answer))
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    labels = torch.full_like(ids, -100)
    for number, row in enumerate(rows):
        labels[number, len(row) - num_answer : len(row)] = torch.tensor(row[-num_answer:])
    return ids, labels
