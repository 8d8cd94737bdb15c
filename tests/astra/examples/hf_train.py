"""Train a Hugging Face tester with dev evaluations and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nip_astra.astra import DPO, ASTSampler
from nip_astra.astra.datasets import CONVOKIT_REDDIT_DEV, CONVOKIT_REDDIT_TRAIN
from nip_astra.astra.ext.transformers.hf_ast_system import (
    HFASTConfiguration,
    HFASTSystem,
    HFASTTrainer,
)

MAX_CHARACTERS = 500
SHORT = {"max_new_tokens": 6}


def main(tester: str, target: str, scorer: Any, ckpt_dir: Path, device: str = "cpu") -> Any:
    system = HFASTSystem(
        tester, target, tester, scorer, device, attacker_options=SHORT, target_options=SHORT
    )
    sampler = ASTSampler(system, [prompt[:MAX_CHARACTERS] for prompt in CONVOKIT_REDDIT_TRAIN])
    solver = DPO(system)
    config = HFASTConfiguration(training_steps=3)
    trainer = HFASTTrainer(
        config,
        sampler,
        solver,
        dev_prompts=CONVOKIT_REDDIT_DEV,
        eval_every=2,
        ckpt_dir=ckpt_dir,
        use_wandb=True,
        show_progress=True,
    )
    trainer.train()
    return trainer
