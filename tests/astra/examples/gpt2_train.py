"""Train a GPT-2 tester through custom methods: texts in, texts and log-probabilities out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, GPT2LMHeadModel

from nip_astra.astra import DPO, ASTSampler, ASTSystem
from nip_astra.astra.datasets import CONVOKIT_REDDIT_DEV, CONVOKIT_REDDIT_TRAIN
from nip_astra.astra.ext.transformers.hf_ast_system import HFASTConfiguration, HFASTTrainer

MAX_NEW_TOKENS = 6


def speak(model: Any, tokenizer: Any, prompts: Sequence[str]) -> list[str]:
    """Continue texts; return only the continuations."""
    read = tokenizer(
        list(prompts),
        padding=True,
        truncation=True,
        max_length=model.config.n_positions - MAX_NEW_TOKENS,
        return_tensors="pt",
        padding_side="left",
        truncation_side="left",
        return_token_type_ids=False,
    ).to(model.device)
    written = model.generate(
        **read,
        pad_token_id=tokenizer.pad_token_id,
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=True,
        top_p=0.9,
        top_k=50,
    )
    new = written[:, read.input_ids.shape[1] :]
    return [" " + text for text in tokenizer.batch_decode(new, skip_special_tokens=True)]


def read_pairs(
    tokenizer: Any, contexts: Sequence[str], continuations: Sequence[str], device: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, attention mask, and mask of the continuation; padded at the end."""
    before, after = tokenizer(list(contexts)).input_ids, tokenizer(list(continuations)).input_ids
    width = max(len(c) + len(x) for c, x in zip(before, after, strict=True))
    ids = torch.full((len(before), width), tokenizer.pad_token_id, device=device)
    is_read = torch.zeros(len(before), width, dtype=torch.bool, device=device)
    is_scored = is_read.clone()
    for row, (context, continuation) in enumerate(zip(before, after, strict=True)):
        start, stop = len(context), len(context) + len(continuation)
        ids[row, :stop] = torch.tensor(context + continuation)
        is_read[row, :stop] = True
        is_scored[row, start:stop] = True
    return ids, is_read, is_scored


def score(model: Any, tokenizer: Any, contexts: Sequence[str], answers: Sequence[str]) -> Tensor:
    """Log-probabilities of the continuation's tokens, 0 elsewhere."""
    ids, is_read, is_scored = read_pairs(tokenizer, contexts, answers, model.device)
    logits = model(input_ids=ids, attention_mask=is_read).logits[:, :-1]
    logprobs = logits.log_softmax(dim=-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return logprobs.masked_fill(~is_scored[:, 1:], 0.0)


class GPT2System(ASTSystem):
    """A GPT-2 tester and target."""

    def __init__(self, model: str, scorer: Any, device: str = "cpu") -> None:
        super().__init__(scorer)
        self.tester = GPT2LMHeadModel.from_pretrained(model).to(device)
        self.target = GPT2LMHeadModel.from_pretrained(model).to(device)
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.tokenizer.pad_token_id = self.tokenizer.eos_token_id

    def rollout_prompt_with_tester(self, x: Sequence[str]) -> list[str]:
        return speak(self.tester, self.tokenizer, x)

    def rollout_prompt_with_target(self, x: Sequence[str]) -> list[str]:
        return speak(self.target, self.tokenizer, x)

    def get_tester_logprobs(self, context: Sequence[str], continuation: Sequence[str]) -> Tensor:
        return score(self.tester, self.tokenizer, context, continuation)

    def get_target_logprobs(self, context: Sequence[str], continuation: Sequence[str]) -> Tensor:
        return score(self.target, self.tokenizer, context, continuation)

    def get_baseline_logprobs(self, context: Sequence[str], continuation: Sequence[str]) -> Tensor:
        return self.get_target_logprobs(context, continuation)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        yield from self.tester.parameters()


def main(model: str, scorer: Any, ckpt_dir: Path, device: str = "cpu") -> Any:
    system = GPT2System(model, scorer, device)
    sampler = ASTSampler(system, CONVOKIT_REDDIT_TRAIN)
    trainer = HFASTTrainer(
        HFASTConfiguration(training_steps=2),
        sampler,
        DPO(system),
        dev_prompts=CONVOKIT_REDDIT_DEV,
        eval_every=100,
        ckpt_dir=ckpt_dir,
    )
    trainer.train()
    return trainer
