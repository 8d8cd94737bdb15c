"""TRL's OnlineDPO on the work of a tree of depth 1, where TRL is installed."""

from __future__ import annotations

import importlib.metadata
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from ast_work import (
    BETA,
    LEARNING_RATE,
    SYSTEM_PROMPTS,
    Files,
    Setting,
    adapter_config,
    write_scenario,
)
from our_ast import DTYPES, OurAst

from nip_astra.language_models.sources import load_causal_lm, load_tokenizer, resolve_model
from nip_astra.scenario_base.conversation.tokens import ChatFormat, Turn


def measure(setting: Setting, precision: str, repeats: int) -> dict[str, Any]:
    """Time a step of TRL and an iteration of ours in turns, in the same precision.

    The work: 8 prompts, 2 samples each, all 8 pairs in one step, and a target that says one token.
    """
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    try:
        version = importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit("TRL is not installed: pip install trl datasets") from None
    work = {"width": 2, "depth": 1, "episodes": 8, "pairs": 8, "response_tokens": 1}
    setting = replace(setting, likelihood_model="reference", **work)
    with tempfile.TemporaryDirectory() as root:
        files = write_scenario(setting, Path(root))
        target = f"ast_chat.target.language_model.dtype={DTYPES[precision]}"
        ours = OurAst(setting, files, precision, [target])
        measured: list[float] = []

        def iterate() -> None:
            ours.watch.seconds.clear()
            number = len(measured)
            ours.learn(ours.play(number).samples, number)
            measured.append(sum(ours.watch.seconds[name] for name in ("rollout", "update")))

        trl = _trl_seconds(setting, files, precision, repeats, iterate)
    slow, fast = statistics.median(trl), statistics.median(measured[1:])
    shown = {"both in": precision, "TRL, s": slow, "ours, s": fast, "ratio": slow / fast}
    return {"shown": shown, "trl_runs": trl, "our_runs": measured[1:], "version": version}


def _contexts(setting: Setting, files: Files) -> list[dict[str, str]]:
    """What the attacker reads before its probe, as TRL's data set of prompts."""
    tokenizer = load_tokenizer(*resolve_model(files.model, None))
    chat = ChatFormat(tokenizer, system_prompt=SYSTEM_PROMPTS["attacker"])
    contexts = [chat.context([Turn(False, chat.encode(prompt))]) for prompt in files.prompts]
    return [{"prompt": tokenizer.decode(ids)} for ids in contexts]


def _trl_seconds(
    setting: Setting, files: Files, precision: str, repeats: int, after_step: Callable[[], None]
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

    source, clock = resolve_model(files.model, None), Clock()
    sampling = setting.sampling("attacker")
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = OnlineDPOTrainer(
            model=load_causal_lm(*source).to(getattr(torch, DTYPES[precision])),
            reward_funcs=_number_of_words,
            args=OnlineDPOConfig(
                output_dir=directory,
                beta=[BETA],
                per_device_train_batch_size=setting.episodes,
                gradient_accumulation_steps=1,
                max_steps=repeats + 1,
                max_new_tokens=sampling.num_tokens,
                generation_kwargs={"min_new_tokens": sampling.num_tokens},
                max_length=4 * setting.context + sampling.num_tokens,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                learning_rate=LEARNING_RATE,
                # Its defaults would compute more: again in the backward pass, in mixed precision.
                gradient_checkpointing=False,
                bf16=False,
                use_cpu=setting.device == "cpu",
                report_to="none",
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                dataloader_num_workers=0,
            ),
            train_dataset=Dataset.from_list(_contexts(setting, files)),
            processing_class=load_tokenizer(*source),
            peft_config=adapter_config() if setting.mode == "lora" else None,
            callbacks=[clock],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return clock.seconds[1:]


def _number_of_words(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]
