"""Opening prompts: ours, a ConvoKit corpus, a dataset of the hub; no harmful prompts ship."""

from __future__ import annotations

import json
import logging
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from nip_astra.astra import datasets as lists
from nip_astra.astra.datasets import openings, prompts, read_adv_bench
from nip_astra.errors import ConfigurationError, DataError

SPLITS = ("train", "dev", "test")


@pytest.fixture(autouse=True)
def _nothing_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (prompts.CONVOKIT, prompts.ADV_BENCH, prompts.ADV_BENCH_TASKS):
        monkeypatch.delenv(variable, raising=False)
    prompts._convokit.cache_clear()


def corpus(folder: Path, count: int = 400) -> Path:
    folder.mkdir()
    rows = []
    for number in range(count):
        opening: dict[str, Any] = {"id": f"p{number}", "text": f"opening {number}"}
        if number % 10 == 0:
            opening["text"] = "[removed]"
        elif number % 10 == 1:
            opening["text"] = None
        reply = {"id": f"r{number}", "text": "a reply", "reply_to": f"p{number}"}
        name = "root" if number % 2 else "conversation_id"  # older corpora use root
        rows += [{**row, name: f"p{number}"} for row in (opening, reply)]
    (folder / "utterances.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_our_openings_replace_those_of_convokit_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        lists_of = {split: getattr(lists, f"CONVOKIT_REDDIT_{split.upper()}") for split in SPLITS}
    assert [len(lists_of[split]) for split in SPLITS] == [108, 24, 48]
    assert not set(lists_of["train"]) & (set(lists_of["dev"]) | set(lists_of["test"]))
    assert "NIP_ASTRA_CONVOKIT" in caplog.text
    lists_of["train"].clear()
    assert len(import_module("nip_astra.astra.datasets.prompts").CONVOKIT_REDDIT_TRAIN) == 108


def test_a_corpus_of_convokit_gives_the_first_utterance_of_each_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = corpus(tmp_path / "reddit-corpus-small")
    monkeypatch.setenv(prompts.CONVOKIT, str(folder))
    result = {split: getattr(lists, f"CONVOKIT_REDDIT_{split.upper()}") for split in SPLITS}
    together = [text for split in SPLITS for text in result[split]]
    assert sorted(together) == sorted(f"opening {n}" for n in range(400) if n % 10 > 1)
    assert result == {split: openings(split, folder) for split in SPLITS}
    assert 0.72 < len(result["train"]) / len(together) < 0.88
    assert len(result["dev"]) < len(result["test"])
    assert not caplog.text


@pytest.mark.parametrize("name", ["dev.jsonl", "dev.txt", "convokit_reddit_prompts_dev.json"])
def test_a_folder_with_a_file_for_each_split_is_read(tmp_path: Path, name: str) -> None:
    texts = ["how was your day ?", "good morning"]
    rows = "\n".join(json.dumps({"prompt": text}) for text in texts)
    written = {".jsonl": rows, ".txt": "\n".join(texts), ".json": json.dumps(texts)}
    (tmp_path / name).write_text(written[Path(name).suffix])
    assert openings("dev", tmp_path) == texts
    with pytest.raises(DataError, match=r"neither utterances\.jsonl.*train\.jsonl"):
        openings("train", tmp_path)


def test_a_damaged_or_empty_corpus_is_reported(tmp_path: Path) -> None:
    folder = corpus(tmp_path / "corpus", 3)
    with (folder / "utterances.jsonl").open("a") as file:
        file.write("[1, 2]\n")
    with pytest.raises(DataError, match="line 7 of "):
        openings("train", folder)
    (folder / "utterances.jsonl").write_text("")
    for split, fact in (("train", "train"), ("valid", "'train', 'dev', 'test'")):
        with pytest.raises(DataError, match=fact):
            openings(split, folder)


def test_a_dataset_of_the_hub_is_read_through_the_datasets_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = pytest.importorskip("datasets")
    splits = {"train": ["hello there", "[deleted]", " hi "], "validation": ["good day"]}
    data = {split: library.Dataset.from_dict({"text": texts}) for split, texts in splits.items()}
    monkeypatch.setattr(library, "load_dataset", {"someone/talk": library.DatasetDict(data)}.get)
    assert openings("train", "hub:someone/talk") == ["hello there", "hi"]
    assert openings("dev", "hub:someone/talk") == ["good day"]
    with pytest.raises(DataError, match="test"):
        openings("test", "hub:someone/talk")
    with pytest.raises(DataError, match=r"'post'.*column="):
        openings("train", "hub:someone/talk", column="post")
    monkeypatch.setattr(library, "load_dataset", Mock(side_effect=ConnectionError("no route")))
    with pytest.raises(DataError, match="no route"):
        openings("train", "hub:someone/talk")


@pytest.mark.parametrize("name", ["ADV_BENCH_PROMPTS", "ADV_BENCH_BASE_TASK_PROMPTS"])
def test_lists_of_harmful_requests_do_not_ship_and_the_error_explains_custom_lists(
    name: str,
) -> None:
    with pytest.raises(ConfigurationError, match=rf"{name}.*not shipped.*NIP_ASTRA_ADV_BENCH"):
        getattr(lists, name)
    with pytest.raises(DataError):
        exec(f"from nip_astra.astra.datasets import {name}")
    assert name not in lists.__all__
    exec("from nip_astra.astra.datasets import *", {})


def test_a_custom_file_is_read_in_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "own.csv"
    table.write_text('goal,target\n"say good day, politely",Good day\n')
    monkeypatch.setenv(prompts.ADV_BENCH, str(table))
    (row,) = lists.ADV_BENCH_PROMPTS
    assert (row.goal, row.target) == ("say good day, politely", "Good day")
    (tmp_path / "tasks.json").write_text('["Write a poem"]')
    monkeypatch.setenv(prompts.ADV_BENCH_TASKS, str(tmp_path / "tasks.json"))
    assert lists.ADV_BENCH_BASE_TASK_PROMPTS == ["Write a poem"]
    table.write_text("goal\nx\n")
    with pytest.raises(DataError, match=r"no column 'target'"):
        read_adv_bench(table)
    with pytest.raises(DataError, match="nowhere"):
        read_adv_bench(tmp_path / "nowhere.csv")
