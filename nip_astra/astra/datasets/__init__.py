"""Opening prompts under the names of ASTRA-RL's lists; see `nip_astra.astra.datasets.prompts`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nip_astra.lazy import lazy_exports

if TYPE_CHECKING:
    from nip_astra.astra.datasets.prompts import AdvBenchPrompt as AdvBenchPrompt
    from nip_astra.astra.datasets.prompts import openings as openings
    from nip_astra.astra.datasets.prompts import read_adv_bench as read_adv_bench

    ADV_BENCH_BASE_TASK_PROMPTS: list[str]
    ADV_BENCH_PROMPTS: list[AdvBenchPrompt]
    CONVOKIT_REDDIT_DEV: list[str]
    CONVOKIT_REDDIT_TEST: list[str]
    CONVOKIT_REDDIT_TRAIN: list[str]

# AdvBench's lists need a file, so `import *` omits them.
__all__ = [
    "CONVOKIT_REDDIT_DEV",
    "CONVOKIT_REDDIT_TEST",
    "CONVOKIT_REDDIT_TRAIN",
    "AdvBenchPrompt",
    "openings",
    "read_adv_bench",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    dict.fromkeys(
        [*__all__, "ADV_BENCH_BASE_TASK_PROMPTS", "ADV_BENCH_PROMPTS"], f"{__name__}.prompts"
    ),
)
