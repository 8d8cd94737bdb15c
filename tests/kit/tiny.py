"""Models small enough to make in a test: random weights, a dozen words, a chat template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.rollouts.samples import Sample
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.trainers.ast.base import AstTrainer

CPU = torch.device("cpu")
WORDS = (
    *("hello", "good", "day", "how", "are", "you", "fine", "thanks"),
    *("the", "cat", "sat", "on", "a", "mat", "silly", "stupid", "."),
)
TEMPLATE = (
    "<bos>{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
    "{{ '<user>' if m.role == 'user' else '<assistant>' }} {{ m.content }} <end>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(words: Sequence[str] = WORDS) -> PreTrainedTokenizerFast:
    """A word-level tokenizer with a chat template."""
    special = ["<pad>", "<unk>", "<bos>", "<end>", "<user>", "<assistant>"]
    vocabulary = {word: i for i, word in enumerate([*special, *words])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token="<end>",
        additional_special_tokens=["<user>", "<assistant>"],
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@dataclass(frozen=True)
class Played:
    """A training rollout with the samples made from it."""

    tree: RolloutTree
    samples: list[Sample]
    metrics: dict[str, float]


@torch.no_grad()
def experience_of(trainer: AstTrainer, iteration: int = 0) -> Played:
    """Play an iteration's episodes and make samples of them."""
    tree = trainer.rollouts.play(iteration)
    found = trainer.digest(tree)
    return Played(tree, found.samples, found.metrics)


def learn(trainer: AstTrainer) -> None:
    """Train without any measurement before or after."""
    trainer._set_seed()
    with trainer._open_progress_bar(), ExitStack() as stack:
        trainer._build_train_context(stack)
        trainer._run_train_loop()


TOOL_TEMPLATE = (
    "<bos>{% for tool in tools or [] %}{{ tool.function | tojson }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    '{% for call in m.tool_calls or [] %}<tool_call>\n{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}<end>'
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes, which can encode any text, with a chat template for tools."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<pad>", "<unk>", "<bos>", "<end>", *alphabet]
    raw = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<bos>", eos_token="<end>"
    )
    tokenizer.chat_template = TOOL_TEMPLATE
    return tokenizer


THINKING_TEMPLATE = (
    "{% set last = namespace(user=-1) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "<bos>{% for tool in tools or [] %}{{ tool.function | tojson }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: "
    "{% if m.reasoning_content and loop.index0 > last.user %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    '{% for call in m.tool_calls or [] %}<tool_call>\n{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}<end>'
    "{% endfor %}{% if add_generation_prompt %}assistant: "
    "{% if opens_thought %}<think>\n{% endif %}{% endif %}"
)
"""As those of Qwen 3: only reasoning after the last message of the user is shown."""


def make_thinking_tokenizer(
    *, opens_thought: bool = False, are_special: bool = False
) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes whose chat template has thoughts, which its prompt may open."""
    tokenizer = make_byte_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"], special_tokens=are_special)
    start = f"{{% set opens_thought = {str(opens_thought).lower()} %}}"
    tokenizer.chat_template = start + THINKING_TEMPLATE
    return tokenizer


Files = tuple[dict[str, bytes], torch.Tensor]


@cache
def _files_of(make: Callable[..., None], **options: int) -> Files:
    """The files of a model by name, and torch's generator state after its creation."""
    with TemporaryDirectory() as folder:
        make(Path(folder), **options)
        files = {file.name: file.read_bytes() for file in Path(folder).iterdir()}
    return files, torch.get_rng_state()


def _write(found: Files, directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in found[0].items():
        (directory / name).write_bytes(content)
    torch.set_rng_state(found[1])
    return directory


def make_language_model(
    directory: Path,
    *,
    seed: int = 0,
    window: int = 96,
    head_size: int = 8,
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> Path:
    """Write a random Llama of two layers with its tokenizer, and return its folder."""
    options = {"seed": seed, "window": window, "head_size": head_size}
    if tokenizer is None:
        return _write(_files_of(_save_language_model, **options), directory)
    _save_language_model(directory, tokenizer=tokenizer, **options)
    return directory


def load_backend(
    folder: Path | str, *, trainable: bool = True, **parameters: Any
) -> HuggingFaceLanguageModel:
    """The Hugging Face backend over the model in a folder, on the CPU."""
    given = HuggingFaceLanguageModel.Parameters(model=str(folder), **parameters)
    return HuggingFaceLanguageModel.load(given, device=CPU, scenario_dir=None, trainable=trainable)


def uniforms_of(num_rows: int, width: int, *, seed: int = 0) -> torch.Tensor:
    """Uniform numbers for a sampler."""
    return torch.rand(num_rows, width, generator=torch.Generator().manual_seed(seed))


def _save_language_model(
    directory: Path,
    *,
    seed: int,
    window: int,
    head_size: int,
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> None:
    tokenizer = tokenizer or make_tokenizer()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=4 * head_size,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=window,
        initializer_range=0.4,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@torch.no_grad()
def make_reciting_model(directory: Path, tokenizer: PreTrainedTokenizerFast, text: str) -> Path:
    """Write a model that answers everything with a text, and return its folder.

    The text is a token of its own, which follows every token and is followed by the end.
    """
    tokenizer = deepcopy(tokenizer)
    tokenizer.add_tokens([AddedToken(text, normalized=False)])
    _save_language_model(directory, seed=0, window=2048, head_size=8, tokenizer=tokenizer)
    model = LlamaForCausalLM.from_pretrained(directory)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    token = tokenizer.convert_tokens_to_ids(text)
    inputs, outputs = model.model.embed_tokens.weight, model.lm_head.weight
    inputs.zero_()
    outputs.zero_()
    inputs[:, 0] = 1.0
    inputs[token] = torch.eye(inputs.shape[1])[1]
    outputs[token, 0] = outputs[tokenizer.eos_token_id, 1] = 20.0
    model.save_pretrained(directory)
    return directory


def make_gpt2(directory: Path) -> Path:
    """Write a random GPT-2, which has its own forward pass only, and return its folder."""
    return _write(_files_of(_save_gpt2), directory)


def _save_gpt2(directory: Path) -> None:
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    sizes = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.4}
    config = GPT2Config(vocab_size=len(tokenizer), bos_token_id=2, eos_token_id=3, **sizes)
    GPT2LMHeadModel(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def make_classifier(directory: Path, *, seed: int = 0) -> Path:
    """Write a random two-label BERT with its tokenizer, and return its folder."""
    return _write(_files_of(_save_classifier, seed=seed), directory)


def _save_classifier(directory: Path, *, seed: int) -> None:
    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=128,
        initializer_range=0.5,
        id2label={0: "civil", 1: "rude"},
        label2id={"civil": 0, "rude": 1},
    )
    BertForSequenceClassification(config).save_pretrained(directory)
    tokenizer.model_max_length = 128
    tokenizer.save_pretrained(directory)


def scenario_section(root: Path, **changes: object) -> dict[str, object]:
    """An `ast_chat` section over tiny models and prompts written below `root`."""
    attacker = make_language_model(root / "attacker", seed=1)
    target = make_language_model(root / "target", seed=2)
    scorer = make_classifier(root / "scorer")
    prompts = {
        "train": ["hello", "good day", "how are you", "the cat sat"],
        "dev": ["hello you", "a cat"],
        "test": ["hello the cat", "good mat", "fine day"],
    }
    for split, lines in prompts.items():
        (root / f"{split}.txt").write_text("\n".join(lines) + "\n")

    def agent(path: Path) -> dict[str, object]:
        return {"language_model": {"_type": "huggingface", "model": str(path)}, "max_new_tokens": 6}

    section: dict[str, object] = {
        "attacker": agent(attacker),
        "target": agent(target),
        "scorer": {"_type": "classifier", "model": str(scorer), "label": "rude"},
        "prompts": {split: str(root / f"{split}.txt") for split in prompts},
        "tree_width": 2,
        "tree_depth": 2,
        "evaluation": {"num_episodes": 6, "num_dev_episodes": 4, "batch_size": 4},
    }
    return section | changes


def write_scenario(root: Path, **changes: object) -> Path:
    """Write a scenario of tiny models below `root` and return its folder."""
    section = scenario_section(root, **changes)
    training = {"lr": 3e-3, "minibatch_size": 4, "num_iterations": 6}
    training["num_episodes_per_experience"] = 3
    text = yaml.safe_dump({"kind": "ast_chat", "training": training, "ast_chat": section})
    (root / "scenario.yaml").write_text(text)
    return root


def sampled_by_vllm(scenario: Path, *roles: str) -> list[str]:
    """Overrides by which vLLM holds the models of agents of a written scenario."""
    return [
        f"ast_chat.{role}.language_model.{option}"
        for role in roles
        for option in ("_type=vllm", f"model={scenario / role}")
    ]
