"""TRL's OnlineDPO on the work of a tree of depth 1, where TRL is installed."""

from __future__ import annotations

import importlib.metadata
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ast_contest import Figures, on_disk
from ast_work import (
    BETA,
    LEARNING_RATE,
    SYSTEM_PROMPTS,
    Files,
    Setting,
    adapter_config,
)
from our_ast import PRECISIONS, OurAst

from nip_astra.language_models.sources import load_causal_lm, load_tokenizer, resolve_model
from nip_astra.scenario_base.conversation.tokens import ChatFormat, Turn

INSTALL_HINT = "TRL is not installed: pip install trl datasets"
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def is_available() -> bool:
    """Say whether TRL with its OnlineDPO can be imported."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    try:
        import trl.experimental.online_dpo  # noqa: F401 - only to see whether it is there
    except ImportError:
        return False
    return True


def setting_of(model: str, mode: Any, device: str, context: int) -> Setting:
    """The work: 8 prompts, 2 samples of 32 tokens, all 8 pairs in one step."""
    return Setting(
        model=model,
        width=2,
        depth=1,
        episodes=8,
        context=context,
        response_tokens=1,
        mode=mode,
        num_pairs=8,
        likelihood_model="reference",
        device=device,
    )


def measure_beside_trl(setting: Setting, precision: str, repeats: int) -> Figures:
    """Time a step of TRL and an iteration of ours in turns, in the same precision."""
    with on_disk(setting) as files:
        texts, num_tokens = _attacker_contexts(setting, files)
        ours = OurAst(setting, files, _overrides(precision))
        measured: list[float] = []

        def iterate() -> None:
            ours.watch.seconds.clear()
            number = len(measured)
            ours.learn(ours.play(number).samples, number)
            measured.append(sum(ours.watch.seconds[name] for name in ("rollout", "update")))

        trl = _trl_seconds(setting, files, texts, precision, repeats, iterate)
    slow, fast = statistics.median(trl), statistics.median(measured[1:])
    return {
        "model": setting.model_name,
        "mode": setting.mode,
        "precision": precision,
        "num_prompts": setting.episodes,
        "prompt_tokens": num_tokens,
        "new_tokens": setting.turn_tokens,
        "trl_seconds": slow,
        "our_seconds": fast,
        "ratio": slow / fast,
        "trl_runs": trl,
        "our_runs": measured[1:],
        "version": importlib.metadata.version("trl"),
    }


def _overrides(precision: str) -> list[str]:
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[precision]
    return [*PRECISIONS[precision], f"ast_chat.target.language_model.dtype={dtype}"]


def _attacker_contexts(setting: Setting, files: Files) -> tuple[list[str], int]:
    """What the attacker reads before its probe as text, and the most tokens of one."""
    tokenizer = load_tokenizer(*resolve_model(files.model, None))
    chat = ChatFormat(tokenizer, system_prompt=SYSTEM_PROMPTS["attacker"])
    contexts = [chat.context([Turn(False, chat.encode(prompt))]) for prompt in files.prompts]
    return [tokenizer.decode(ids) for ids in contexts], max(len(ids) for ids in contexts)


def _trl_seconds(
    setting: Setting,
    files: Files,
    texts: list[str],
    precision: str,
    repeats: int,
    after_step: Callable[[], None],
) -> list[float]:
    """The seconds of each step but the first, which warms up."""
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    class Clock(TrainerCallback):  # type: ignore[misc]
        """Notes when steps begin and end."""

        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds.append(time.perf_counter() - self.started)
            after_step()

    name, gguf_file = resolve_model(files.model, None)
    clock = Clock()
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = OnlineDPOTrainer(
            model=load_causal_lm(name, gguf_file).to(_DTYPES[precision]),
            reward_funcs=_number_of_words,
            args=OnlineDPOConfig(
                **_options(setting, repeats), beta=[BETA], output_dir=str(Path(directory))
            ),
            train_dataset=Dataset.from_list([{"prompt": text} for text in texts]),
            processing_class=load_tokenizer(name, gguf_file),
            peft_config=adapter_config() if setting.mode == "lora" else None,
            callbacks=[clock],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return clock.seconds[1:]


def _options(setting: Setting, repeats: int) -> dict[str, Any]:
    return {
        "per_device_train_batch_size": setting.episodes,
        "gradient_accumulation_steps": 1,
        "max_steps": repeats + 1,
        "max_new_tokens": setting.turn_tokens,
        "generation_kwargs": {"min_new_tokens": setting.turn_tokens},
        "max_length": 4 * setting.context + setting.turn_tokens,
        "temperature": setting.temperature,
        "top_k": setting.top_k,
        "top_p": setting.top_p,
        "learning_rate": LEARNING_RATE,
        # Its defaults would compute more: again in the backward pass, and in mixed precision.
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": setting.device == "cpu",
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "dataloader_num_workers": 0,
    }


def _number_of_words(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]
