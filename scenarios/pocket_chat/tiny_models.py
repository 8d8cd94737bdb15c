"""Small models from scratch: tokenizer with a chat template, Llama models, and their training."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<pad>", "<bos>", "<end>", "<unk>", "<user>", "<assistant>")
PAD, BOS, END, UNK, USER, ASSISTANT = range(6)

_CHAT_TEMPLATE = (
    "{{ '<bos>' }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'SPACE<user>SPACE' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'SPACE<assistant>SPACE' }}"
    "{% else %}{{ raise_exception('WHO the roles user and assistant only, not '"
    " + message['role']) }}{% endif %}"
    "{{ message['content'] | trim + 'SPACE<end>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'SPACE<assistant>' }}{% endif %}"
)

CONTEXT_LENGTH = 256

Batch = tuple[Tensor, Tensor]
"""Token ids and labels, both int64 [B, T]; label -100 is excluded from the loss."""


def chat_template(who: str, space: str = " ") -> str:
    """Return a template of the roles user and assistant, with a space around special tokens.

    `who` knows these roles only, as the error for another one says.
    """
    return _CHAT_TEMPLATE.replace("WHO", who).replace("SPACE", space)


def word_level(words: Iterable[str]) -> Tokenizer:
    """Return a tokenizer that numbers words in order."""
    vocabulary = {word: index for index, word in enumerate(words)}
    return Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))


def build_tokenizer(words: Iterable[str]) -> PreTrainedTokenizerFast:
    """Build a lower-case word tokenizer."""
    backend = word_level((*SPECIAL_TOKENS, *words))
    backend.normalizer = Lowercase()
    backend.pre_tokenizer = WhitespaceSplit()
    return with_chat(backend, chat_template("pocket_chat models know"))


def with_chat(
    backend: Tokenizer, template: str, roles: Iterable[str] = ("<user>", "<assistant>")
) -> PreTrainedTokenizerFast:
    """Return a tokenizer for chat whose end-of-turn token is also end-of-sequence."""
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<bos>",
        eos_token="<end>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=list(roles),
        padding_side="left",
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
        chat_template=template,
    )


SAMPLING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 24}


def build_llama(
    vocab_size: int,
    *,
    hidden: int,
    intermediate: int,
    num_layers: int,
    seed: int,
    initializer_range: float = 0.05,
    sampling: Mapping[str, float] = SAMPLING,
) -> LlamaForCausalLM:
    """Create a randomly initialised Llama with tied embeddings."""
    tokens = {"bos_token_id": BOS, "eos_token_id": END, "pad_token_id": PAD}
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        initializer_range=initializer_range,
        **tokens,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, **sampling, **tokens)
    return model


def train(
    model: torch.nn.Module,
    next_batch: Callable[[random.Random], Batch],
    *,
    steps: int,
    lr: float,
    seed: int,
    report: Callable[[int, float], None] | None = None,
) -> None:
    """Minimise next-token cross entropy with AdamW, linear warm-up and cosine decay.

    Parameters
    ----------
    next_batch : callable
        Gives a batch from a generator that is seeded once.
    steps, lr : int, float
        Optimizer steps and peak learning rate.
    report : callable, optional
        Receives the step and its loss every 50 steps.
    """
    rng = random.Random(seed)
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.05)
    warmup = max(1, min(60, steps // 10))
    model.train()
    for step in range(steps):
        progress = max(0.0, (step - warmup) / max(1, steps - warmup))
        scale = min(1.0, (step + 1) / warmup) * (
            0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress))
        )
        for group in optimizer.param_groups:
            group["lr"] = lr * scale
        ids_BT, labels_BT = next_batch(rng)
        logits = model(input_ids=ids_BT, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels_BT[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if report is not None and (step % 50 == 0 or step == steps - 1):
            report(step, float(loss.detach()))
    model.eval()


def save(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write a model and its tokenizer in Hugging Face layout."""
    model.save_pretrained(directory)  # type: ignore[operator]
    tokenizer.save_pretrained(str(directory))
    for file in directory.iterdir():
        file.chmod(0o644)  # safetensors writes files that only their owner reads
