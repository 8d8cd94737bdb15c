"""Opening prompts of everyday conversations, our own or ConvoKit's, and AdvBench from a given file.

The lists of ASTRA-RL are attributes of this module, read on first access: `CONVOKIT_REDDIT_TRAIN`,
`CONVOKIT_REDDIT_DEV`, `CONVOKIT_REDDIT_TEST`, `ADV_BENCH_PROMPTS` and
`ADV_BENCH_BASE_TASK_PROMPTS`. Environment variables give their sources.
"""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

from nip_astra.errors import DataError
from nip_astra.lazy import import_extra
from nip_astra.parameters.content import HUB, find_scenario, resolve_reference
from nip_astra.scenario_base.conversation.prompts import read_prompts
from nip_astra.trust import read_variable
from nip_astra.utils.seeding import derive_seed

logger = logging.getLogger(__name__)

Split = Literal["train", "dev", "test"]

CONVOKIT = "NIP_ASTRA_CONVOKIT"
"""Environment variable with the source of `CONVOKIT_REDDIT_*`, a `source` of `openings`."""
ADV_BENCH = "NIP_ASTRA_ADV_BENCH"
"""Environment variable with a CSV file with the columns goal and target."""
ADV_BENCH_TASKS = "NIP_ASTRA_ADV_BENCH_TASKS"
"""Environment variable with a file of prompts, for instance a JSON list of texts."""

OWN_PROMPTS = "smollm2_chat"
"""The scenario whose opening prompts are the default."""
TRAIN_SHARE, DEV_SHARE = 80, 5
"""Per cent of a corpus without splits; the rest is for tests."""
NO_TEXTS = ("", "[deleted]", "[removed]")
"""Texts of deleted posts."""
HUB_SPLITS = {"train": ("train",), "dev": ("dev", "validation"), "test": ("test",)}


@dataclass
class AdvBenchPrompt:
    """A row of AdvBench.

    Attributes
    ----------
    goal : str
        The request.
    target : str
        Beginning of a compliant answer.
    """

    goal: str
    target: str


def openings(split: Split, source: str | Path | None = None, *, column: str = "text") -> list[str]:
    """Return the opening prompts of a split.

    Parameters
    ----------
    split : {"train", "dev", "test"}
        Splits have no prompt in common.
    source : str or Path, optional
        A corpus downloaded by ConvoKit (a folder with `utterances.jsonl`; the first utterance of
        each conversation is used), a folder with a file of prompts for each split
        (`train.jsonl`, or `convokit_reddit_prompts_train.json`), or `hub:owner/name` for a dataset
        of the Hugging Face hub; by default our own everyday openings.
    column : str
        Column of the texts in a dataset of the hub.

    Raises
    ------
    DataError
        If the source is missing or has none.
    """
    if split not in get_args(Split):
        raise DataError(f"unknown split {split!r} of the openings. Known: 'train', 'dev', 'test'.")
    if source is None:
        return [*read_prompts(f"scenario://prompts/{split}.jsonl", find_scenario(OWN_PROMPTS))]
    if str(source).startswith(HUB):
        found = _of_hub(split, str(resolve_reference(str(source))), column)
    else:
        found = _of_folder(split, Path(source).expanduser())
    if not found:
        raise DataError(f"{source} has no {split} openings. Give a source with texts.")
    return found


def read_adv_bench(path: str | Path) -> list[AdvBenchPrompt]:
    """Read a CSV file with the columns `goal` and `target`."""
    reason: Exception
    try:
        with Path(path).expanduser().open(encoding="utf-8-sig", newline="") as file:
            return [AdvBenchPrompt(row["goal"], row["target"]) for row in csv.DictReader(file)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error
    except KeyError as error:
        reason = ValueError(f"it has no column {error}")
    raise DataError(
        f"cannot read AdvBench from {path}: {reason}. Give a CSV file with the columns goal and "
        "target."
    ) from reason


def __getattr__(name: str) -> Any:
    prefix, _, split = name.rpartition("_")
    if prefix == "CONVOKIT_REDDIT" and split.lower() in get_args(Split):
        return list(_convokit(split.lower(), read_variable(CONVOKIT) or None))
    if name == "ADV_BENCH_PROMPTS":
        return read_adv_bench(_named_file(name, ADV_BENCH, "a CSV file with goal and target"))
    if name == "ADV_BENCH_BASE_TASK_PROMPTS":
        file = _named_file(name, ADV_BENCH_TASKS, "a JSON list of texts, or one text a line")
        return read_prompts(str(Path(file).expanduser()), None)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@lru_cache(maxsize=6)
def _convokit(split: Split, source: str | None) -> list[str]:
    found = openings(split, source)
    if source is None:
        logger.warning(
            "CONVOKIT_REDDIT_%s holds %d everyday openings of nip_astra, in the place of "
            "ConvoKit's; set the environment variable %s to a folder of the corpus to read those",
            split.upper(),
            len(found),
            CONVOKIT,
        )
    return found


def _named_file(name: str, variable: str, what: str) -> str:
    path = (read_variable(variable) or "").strip()
    if not path:
        raise DataError(
            f"{name}: lists of harmful requests are not shipped. Set the environment variable "
            f"{variable} to {what}, or train from everyday openings, openings('train')."
        )
    return path


def _of_folder(split: str, folder: Path) -> list[str]:
    if (folder / "utterances.jsonl").is_file():
        texts = _first_utterances(folder / "utterances.jsonl")
        return [text for number, text in texts if _split_of(number) == split]
    names = [f"{split}.jsonl", f"{split}.json", f"{split}.txt"]
    names.append(f"convokit_reddit_prompts_{split}.json")
    found = next((folder / name for name in names if (folder / name).is_file()), None)
    if found is None:
        raise DataError(
            f"{folder} has neither utterances.jsonl (ConvoKit) nor {', '.join(names)}. Give the "
            f"folder of the {split} openings; read_prompts reads a single file."
        )
    return [*read_prompts(str(found), None)]


def _first_utterances(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the number and text of the first utterance of each conversation of a corpus."""
    with path.open(encoding="utf-8") as file:
        for line_number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
                number, text = str(row["id"]), str(row["text"] or "").strip()
                conversation = row.get("conversation_id", row.get("root"))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise DataError(
                    f"line {line_number} of {path} is not an utterance of ConvoKit: "
                    f"{type(error).__name__}: {error}. Download the corpus again."
                ) from error
            if str(conversation) == number and text not in NO_TEXTS:
                yield number, text


def _split_of(number: str) -> str:
    """Return the fixed split of a conversation."""
    place = derive_seed("convokit", number) % 100
    if place < TRAIN_SHARE:
        return "train"
    return "dev" if place < TRAIN_SHARE + DEV_SHARE else "test"


def _of_hub(split: str, name: str, column: str) -> list[str]:
    datasets = import_extra("datasets", f"reading {name!r} from the hub", "datasets")
    try:
        splits = datasets.load_dataset(name)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise DataError(
            f"cannot read openings of {name!r} from the hub: {reason}. Give hub:owner/name of a "
            "reachable dataset, or a folder."
        ) from error
    found = next((splits[own] for own in HUB_SPLITS[split] if own in splits), None)
    if found is None or column not in found.column_names:
        has = "no such split" if found is None else f"no column {column!r}"
        raise DataError(
            f"no {split} openings in {name!r}, which has {has} and the columns "
            f"{dict(splits.column_names)}. Name the column with texts, "
            "openings(split, source, column=...), or split the dataset."
        )
    texts = (str(text).strip() for text in found[column])
    return [text for text in texts if text not in NO_TEXTS]
