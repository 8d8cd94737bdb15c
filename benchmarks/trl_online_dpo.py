"""TRL's OnlineDPO on the work of a tree of depth 1; needs TRL."""

from __future__ import annotations

import importlib.metadata
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from our_ast import DTYPES, OurAst, Setting

from nip_astra.language_models.sources import load_causal_lm, load_tokenizer, resolve_model
from nip_astra.resolving.resolution import ResolvedExperiment
from nip_astra.rollouts.messages import Turn
from nip_astra.scenario_base.conversation.tokens import ChatFormat


def measure(setting: Setting, precision: str, repeats: int) -> dict[str, Any]:
    """Time interleaved steps of TRL and iterations of ours in the same precision.

    The work is 8 prompts with 2 samples each, all 8 pairs in one step; the target generates one
    token.
    """
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    try:
        version = importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit("TRL is not installed: pip install trl datasets") from None
    setting = replace(setting, width=2, depth=1, episodes=8, pairs=8)
    resolved = setting.resolve(
        precision,
        f"ast_chat.target.language_model.dtype={DTYPES[precision]}",
        "ast_chat.target.min_new_tokens=1",
        "ast_chat.target.max_new_tokens=1",
        "ast_chat.reward.likelihood_model=reference",
    )
    prompts = setting.openings(resolved)
    ours = OurAst(resolved, prompts)
    measured: list[float] = []

    def iterate() -> None:
        measured.append(ours.iterate(len(measured), learns=True)["iteration"].seconds)

    trl = _trl_seconds(resolved, prompts, precision, repeats, iterate)
    slow, fast = statistics.median(trl), statistics.median(measured[1:])
    shown = {"both in": precision, "TRL, s": slow, "ours, s": fast, "ratio": slow / fast}
    return {"shown": shown, "trl_runs": trl, "our_runs": measured[1:], "version": version}


def _trl_seconds(
    resolved: ResolvedExperiment,
    prompts: Sequence[str],
    precision: str,
    repeats: int,
    after_step: Callable[[], None],
) -> list[float]:
    """Seconds of each step after the first, which is a warm-up."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import PrinterCallback, TrainerCallback
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    class Clock(TrainerCallback):  # type: ignore[misc]
        """Times the steps."""

        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds.append(time.perf_counter() - self.started)
            after_step()

    parameters: Any = resolved.hyper_params
    agent, clock = getattr(parameters, resolved.kind).attacker, Clock()
    source = resolve_model(agent.language_model.model, resolved.scenario_dir)
    tokenizer, lora = load_tokenizer(*source), agent.language_model.lora
    # The attacker's context before its probe.
    chat = ChatFormat(tokenizer, system_prompt=agent.system_prompt)
    contexts = [chat.context([Turn("user", ids=chat.encode(prompt))]) for prompt in prompts]
    peft = {"lora_alpha": lora.alpha, "target_modules": lora.target_modules} if lora else {}
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = OnlineDPOTrainer(
            model=load_causal_lm(*source).to(getattr(torch, DTYPES[precision])),
            reward_funcs=_number_of_words,
            args=OnlineDPOConfig(
                output_dir=directory,
                beta=[parameters.ast_dpo.beta],
                per_device_train_batch_size=len(prompts),
                gradient_accumulation_steps=1,
                max_steps=repeats + 1,
                max_new_tokens=agent.max_new_tokens,
                generation_kwargs={"min_new_tokens": agent.min_new_tokens},
                max_length=4 * max(map(len, contexts)),
                temperature=agent.temperature,
                top_k=agent.top_k,
                top_p=agent.top_p,
                learning_rate=parameters.training.lr,
                # TRL's defaults do more work: gradient checkpointing and mixed precision.
                gradient_checkpointing=False,
                bf16=False,
                use_cpu=True,
                report_to="none",
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                dataloader_num_workers=0,
            ),
            train_dataset=Dataset.from_list([{"prompt": tokenizer.decode(c)} for c in contexts]),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=lora.rank, **peft) if lora else None,
            callbacks=[clock],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return clock.seconds[1:]


def _number_of_words(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]
