"""Builds the model of this scenario: a small Llama that knows the rules of the game, but plays
badly.

    python scenarios/secret_word/build.py

It learns from games of a noisy policy, so that it answers in the right format, asks and states the
word more often than not, and decides slightly better than chance.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "pocket_chat"))

import tiny_models
import torch
from jinja2 import Environment, FileSystemLoader
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from nip_astra.scenarios.secret_word import TEST_WORDS, TRAIN_WORDS

HERE = Path(__file__).parent
WORDS = (*TRAIN_WORDS, *TEST_WORDS)
SPECIAL = ("<pad>", "<bos>", "<end>", "<unk>", "<system>", "<user>", "<assistant>")
PROMPT_WORDS = (
    "what is the secret word ? it decision : accept reject . , you know are paid when verifier "
    "decides to answer with one claim that now decide or ask for write and prover prover0 prover1 "
    "prover2 main chat none your turn"
)
TEMPLATE = (
    "{{ '<bos>' }}{% for message in messages %}"
    "{{ ' <' + message['role'] + '> ' + message['content'] | trim + ' <end>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ ' <assistant>' }}{% endif %}"
)
QUESTION = "What is the secret word?"
SHARE_ASKED, SHARE_TOLD, SHARE_RIGHT = 0.75, 0.65, 0.70
"""How often the noisy policy asks at first, tells the word, and decides by what it was told."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a lower-case word tokenizer whose end-of-turn token ends the text."""
    names = dict.fromkeys([*SPECIAL, *PROMPT_WORDS.split(), *WORDS])
    backend = tiny_models.word_level(names)
    backend.normalizer, backend.pre_tokenizer = Lowercase(), Whitespace()
    return tiny_models.with_chat(backend, TEMPLATE, ("<system>", "<user>", "<assistant>"))


class Games:
    """Turns of games of the noisy policy, each with its messages and the answer."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        environment = Environment(
            loader=FileSystemLoader(HERE / "prompts"), trim_blocks=True, lstrip_blocks=True
        )
        self.templates = {
            role: environment.get_template(f"{role}.jinja") for role in ("prover", "verifier")
        }

    def _render(self, role: str, block: str, **values: object) -> str:
        template = self.templates[role]
        context = template.new_context({"channels": ["main"], **values})
        return "".join(template.blocks[block](context)).strip()

    def turn(self, noise: float) -> tuple[list[dict[str, str]], str]:
        """Return messages and answer; `noise` 1 is the noisy policy and 0 the best one."""
        draw = self.random
        word, other, third = draw.sample(WORDS, 3)
        is_true = draw.random() < 0.5
        claim = word if is_true else other
        kind = draw.choices(("ask", "tell", "decide"), (1, 1, 3))[0]
        if kind == "tell":
            stance = "accept" if draw.random() < 0.8 else "reject"
            opening = self._render("prover", "opening", datapoint={"word": word}, stance=stance)
            turn = self._render("prover", "turn")
            asked = draw.choice([f"Verifier: {QUESTION}", ""])
            is_told = draw.random() < 1 - noise * (1 - SHARE_TOLD)
            answer = word if is_told else draw.choice(WORDS)
            return [_user(opening, asked, turn)], answer
        opening = self._render("verifier", "opening", datapoint={"claim": claim})
        last, may = kind == "decide", draw.random() < 0.9
        turn = self._render("verifier", "turn", is_last_turn=last, may_decide=may)
        if kind == "ask":
            asks = not may or draw.random() < SHARE_ASKED
            guess = f"Decision: {draw.choice(['accept', 'reject'])}"
            return [_user(opening, turn)], QUESTION if asks else guess
        told = word if draw.random() < 0.7 else third
        decision = "accept" if told == claim else "reject"
        if draw.random() > 1 - noise * (1 - SHARE_RIGHT):
            decision = "reject" if decision == "accept" else "accept"
        heard = f"Prover: {told}"
        if draw.random() < 0.7:
            before = [_user(opening), {"role": "assistant", "content": QUESTION}]
            return [*before, _user(heard, turn)], f"Decision: {decision}"
        return [_user(opening, heard, turn)], f"Decision: {decision}"


def _user(*parts: str) -> dict[str, str]:
    return {"role": "user", "content": "\n\n".join(filter(None, parts))}


def encode(
    tokenizer: PreTrainedTokenizerFast, turns: list[tuple[list[dict[str, str]], str]]
) -> tuple[Tensor, Tensor]:
    """Return token ids and labels [B, T]; label -100 is excluded from the loss."""
    rows = []
    for messages, answer in turns:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        context = tokenizer.encode(text, add_special_tokens=False)
        rows.append((context, [*tokenizer.encode(answer, add_special_tokens=False), 2]))
    length = max(len(context) + len(said) for context, said in rows)
    ids_BT = torch.zeros(len(rows), length, dtype=torch.long)
    labels_BT = torch.full((len(rows), length), -100)
    for number, (context, said) in enumerate(rows):
        end = len(context) + len(said)
        ids_BT[number, :end] = torch.tensor([*context, *said])
        labels_BT[number, len(context) : end] = torch.tensor(said)
    assert 3 not in ids_BT, "a word of the prompts is not in the vocabulary"
    return ids_BT, labels_BT


def main() -> None:
    """Train and write the model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--noisy-steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE / "models" / "player")
    args = parser.parse_args()
    tokenizer, games = build_tokenizer(), Games(args.seed)
    shape = {"hidden": 64, "intermediate": 192, "num_layers": 3, "initializer_range": 0.08}
    model = tiny_models.build_llama(len(tokenizer), **shape, seed=args.seed, sampling={})
    total = args.steps + args.noisy_steps
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=total)
    for step in range(total):
        # The best policy first: what it teaches to compare, noise would teach slowly.
        noise = 0.0 if step < args.steps else 1.0
        ids_BT, labels_BT = encode(tokenizer, [games.turn(noise) for _ in range(64)])
        loss = model(input_ids=ids_BT, labels=labels_BT).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == total - 1:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    model.half().save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"{sum(weights.numel() for weights in model.parameters())} weights in {args.out}")


if __name__ == "__main__":
    main()
