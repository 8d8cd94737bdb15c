"""Prompts are read unchanged, and a file without prompts is reported."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nip_astra.errors import ConfigurationError, DataError, MissingDependencyError
from nip_astra.rollouts.messages import ToolCall, Turn
from nip_astra.rollouts.prompts import columns_of
from nip_astra.scenario_base.conversation.prompts import read_prompts
from tests.kit.command_line import CommandLine
from tests.kit.messages import says


def written(folder: Path, name: str, text: str) -> str:
    (folder / name).write_bytes(text.encode("utf-8"))
    return str(folder / name)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.txt", "hello you\n\n  good day  \r\nhow are you"),
        ("p.jsonl", '{"prompt": "hello you"}\n\n{"id": 3, "prompt": "good day"}\n'
                    '{"prompt": "how are you"}\n'),
        ("p.json", '["hello you", "good day", "", "how are you"]'),
    ],
)  # fmt: skip
def test_each_kind_of_file_gives_its_prompts_in_order(tmp_path: Path, name: str, text: str) -> None:
    expected = ["hello you", "good day", "how are you"]
    assert read_prompts(written(tmp_path, name, text), None) == expected
    assert read_prompts(f"scenario://{name}", tmp_path) == expected
    with pytest.raises(ConfigurationError, match=r"scenario://"):
        read_prompts(f"scenario://{name}", None)
    # Editors on Windows write a byte order mark before the first character.
    assert read_prompts(written(tmp_path, name, "\ufeff" + text), None) == expected


def test_a_prompt_may_hold_any_character_but_the_end_of_its_line(tmp_path: Path) -> None:
    path = written(tmp_path, "p.jsonl", '{"prompt": "one\u2028two\\nthree \u2603"}\n')
    assert read_prompts(path, None) == ["one\u2028two\nthree \u2603"]
    long = "long " * 30_000 + "text"
    assert read_prompts(written(tmp_path, "p.csv", f"prompt\n{long}\n"), None) == [long]
    path = written(tmp_path, "p.txt", "one\u2028two\x0bthree\n")
    assert read_prompts(path, None) == ["one\u2028two\x0bthree"]


UNREADABLE: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "missing": (lambda path: None, ("No such file", ".txt", ".parquet")),
    "bytes": (lambda path: path.write_bytes(b"\xff\xfe\x00"), ("utf-8", ".txt")),
    "folder": (Path.mkdir, ("not a file",)),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_other_than_a_text_file_is_refused_with_its_path(tmp_path: Path, kind: str) -> None:
    make, facts = UNREADABLE[kind]
    make(tmp_path / "p.txt")
    with pytest.raises(DataError) as caught:
        read_prompts("scenario://p.txt", tmp_path)
    assert says(caught.value, tmp_path / "p.txt", *facts)
    with pytest.raises(DataError, match="not a file"):
        read_prompts("/dev/zero", None)


def test_a_table_is_read_by_column_and_the_others_go_with_the_prompt(tmp_path: Path) -> None:
    text = 'goal,kind,weight\n"say a, or b",first,1\nhello,,2\n'
    path = written(tmp_path, "p.csv", text)
    prompts = read_prompts(path, None, "goal")
    assert prompts == ["say a, or b", "hello"]
    assert [columns_of(prompt) for prompt in prompts] == [
        (("kind", "first"), ("weight", "1")),
        (("kind", ""), ("weight", "2")),
    ]
    tabs = written(tmp_path, "p.tsv", text.replace('"say a, or b",', "say a\t").replace(",", "\t"))
    assert read_prompts(tabs, None, "goal") == ["say a", "hello"]
    lines = '{"goal": "hello", "id": 3, "parts": [1]}\n'
    (prompt,) = read_prompts(written(tmp_path, "p.jsonl", lines), None, "goal")
    assert (prompt, columns_of(prompt)) == ("hello", (("id", 3), ("parts", "[1]")))
    again = pickle.loads(pickle.dumps(prompt))
    assert (again, columns_of(again)) == (prompt, columns_of(prompt))


@pytest.mark.parametrize(
    ("name", "text", "column", "fact"),
    [
        *((name, text, "prompt", "no prompts") for name, text in (
            ("p.txt", ""), ("p.txt", " \n\n"), ("p.jsonl", "\n"), ("p.jsonl", '{"prompt": " "}'),
            ("p.json", "[]"),
        )),
        ("p.jsonl", '{"prompt": "a"}\nhello\n', "prompt", "line 2: Expecting value"),
        ("p.jsonl", '{"prompt": "a"}\n\n{"text": "b"}\n', "prompt", "line 3: no column 'prompt'"),
        ("p.jsonl", '["a"]\n', "prompt", "line 1: not an object"),
        ("p.jsonl", '{"prompt": null}\n', "prompt", "line 1: the prompt null"),
        ("p.jsonl", '{"prompt": 3}\n', "prompt", "line 1: the prompt 3"),
        ("p.json", '{"prompt": "a"}', "prompt", "not a list"),
        ("p.json", '["a", null]', "prompt", "item 2: the prompt null"),
        ("p.json", "[", "prompt", "Expecting value"),
        ("p.csv", "goal,kind\na,b\n", "gaol", "'goal'"),
        ("p.csv", "goal,kind\na\n", "goal", "as many values as columns"),
        ("p.csv", "goal,kind\na,b,c\n", "goal", "as many values as columns"),
        ("p.txt", "hello\n", "goal", "no columns"),
        ("p.json", '["hello"]', "goal", "no columns"),
        ("p.jsonl", '{"prompt": "\\ud800"}\n', "prompt", "lone surrogate"),
        ("p.jsonl", '{"prompt": "a", "b": "\\udc00"}\n', "prompt", "lone surrogate"),
        ("p.json", '["\\ud800"]', "prompt", "lone surrogate"),
        ("p.json", "[" * 100_000, "prompt", "too deeply nested"),
        ("p.jsonl", "[" * 100_000 + "\n", "prompt", "too deeply nested"),
    ],
)  # fmt: skip
def test_invalid_prompts_are_reported(
    tmp_path: Path, name: str, text: str, column: str, fact: str
) -> None:
    path = written(tmp_path, name, text)
    with pytest.raises(DataError) as caught:
        read_prompts(path, None, column)
    assert says(caught.value, path, fact)


def test_a_data_set_is_read_by_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "goals"
    folder.mkdir()
    written(folder, "train.csv", "goal,kind\n" + "".join(f"goal {n},k{n}\n" for n in range(4)))
    written(folder, "test.csv", "goal,kind\nheld out,t\n")
    first = read_prompts(f"{folder}:train[:50%]", None, "goal")
    assert first == ["goal 0", "goal 1"]
    assert columns_of(first[1]) == (("kind", "k1"),)
    assert read_prompts(str(folder), None, "goal")[3] == "goal 3"
    assert read_prompts(f"{folder}:test", None, "goal") == ["held out"]
    with pytest.raises(DataError, match="split 'none'"):
        read_prompts(f"{folder}:none", None, "goal")
    with pytest.raises(DataError, match="did you mean 'goal'"):
        read_prompts(str(folder), None, "gaol")


def test_a_hub_id_goes_to_the_package_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    loaded = {("owner/name", "train[:80%]"): [{"goal": "hello"}]}
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: loaded[name, split])
    assert read_prompts("owner/name:train[:80%]", None, "goal") == ["hello"]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDependencyError, match=r"nip_astra\[datasets\]"):
        read_prompts("owner/name", None)


SCORER = """
def rate(completions, columns):
    assert all(set(row) == {"kind", "share"} for row in columns), columns
    return [float(row["share"]) for row in columns]
"""
COLUMNS = {"red": {"kind": "red", "share": "0.25"}, "blue": {"kind": "blue", "share": "0.75"}}


def test_a_scorer_and_all_records_have_the_columns(cli: CommandLine) -> None:
    scorer = cli.write("scorer.py", SCORER)
    splits = {"train": ("hello", "good"), "dev": ("thanks", "how"), "test": ("day", "fine")}
    for split, (red, blue) in splits.items():
        cli.write(f"{split}.csv", f"goal,kind,share\n{red},red,0.25\n{blue},blue,0.75\n")
    overrides = (
        *(f"ast_chat.prompts.{split}={cli.folder / split}.csv" for split in splits),
        "ast_chat.prompts.column=goal",
        f"ast_chat.scorer={{_type: python, function: '{scorer}:rate'}}",
        "training.num_iterations=1",
        "ast_chat.evaluation.num_episodes=4",
    )
    output = cli.run(overrides=overrides)
    assert output.code == 0, output.err
    run = cli.folder / "runs" / "one"
    cli.ok("evaluate", str(run), "--num-episodes", "4", "--probability-episodes", "0")
    files = [*(run / "rollouts").glob("*.jsonl"), run / "evaluations" / "test" / "rows.jsonl"]
    assert len(files) == 4
    for file in map(Path, files):
        for line in file.read_text().splitlines():
            row = json.loads(line)
            beside = row["prompt_columns"]
            assert beside == COLUMNS[beside["kind"]]
            assert row["response_score"] == float(beside["share"])


def test_a_damaged_parquet_file_is_named_without_advice_on_the_network(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1 and then nothing")
    with pytest.raises(DataError) as caught:
        read_prompts(str(path), None)
    assert str(path) in str(caught.value)
    assert "network" not in str(caught.value)


def test_the_hubs_prefix_names_a_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    loaded = {("someone/talk", "train"): ["hello"], ("someone/talk", "dev"): ["good day"]}
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: loaded[name, split])
    assert read_prompts("hub:someone/talk", None) == ["hello"]
    assert read_prompts("hub:someone/talk:dev", None) == ["good day"]
    with pytest.raises(ConfigurationError):
        read_prompts("hub:", None)


# ---- data as people have them


def test_a_semicolon_separates_columns_that_no_comma_does(tmp_path: Path) -> None:
    path = written(tmp_path, "p.csv", 'question;answer\n"1,5 + 1; ?";2,5\n')
    (prompt,) = read_prompts(path, None, "question")
    assert prompt == "1,5 + 1; ?"
    assert columns_of(prompt) == (("answer", "2,5"),)


def test_parts_of_a_message_are_its_text(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "a.", "image_url": None}]
    row = {"messages": [{"role": "user", "content": parts}]}
    path = written(tmp_path, "p.jsonl", json.dumps(row))
    (prompt,) = read_prompts(path, None, "messages")
    assert prompt == "Say a."
    parts[0] = {"type": "image_url", "image_url": {"url": "x"}}
    with pytest.raises(DataError, match="'image_url'"):
        read_prompts(written(tmp_path, "p.jsonl", json.dumps(row)), None, "messages")


CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1, "of_another": None}])
def test_a_prompt_with_calls_and_results_of_tools_is_read(
    tmp_path: Path, arguments: object
) -> None:
    call = CALL | {"function": {"name": "add", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    path = written(tmp_path, "p.jsonl", json.dumps({"prompt": messages}))
    (prompt,) = read_prompts(path, None)
    assert prompt.messages == (
        Turn("user", "1 + 1?"),
        Turn("assistant", calls=(ToolCall("add", {"a": 1}),)),
        Turn("tool", "2"),
    )
    assert "add" in prompt
    copy = pickle.loads(pickle.dumps(prompt))
    assert copy.messages == prompt.messages


@pytest.mark.parametrize(
    ("messages", "fact"),
    [
        ([{"role": "tool", "content": "2"}], "tool_calls"),
        ([{"role": "user", "content": "a", "tool_calls": [CALL]}], "tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "a name"),
        ([{"role": "system", "content": "a"}], "last message"),
        ([{"role": "assistant", "tool_calls": [CALL]}], "last message"),
    ],
)
def test_other_messages_of_tools_are_refused(
    tmp_path: Path, messages: list[object], fact: str
) -> None:
    path = written(tmp_path, "p.jsonl", json.dumps({"prompt": messages}))
    with pytest.raises(DataError, match=fact):
        read_prompts(path, None)


def test_saved_datasets_are_read_from_their_folders(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    train = datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}])
    train.save_to_disk(str(tmp_path / "one"))
    test = datasets.Dataset.from_list([{"prompt": "c"}])
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(str(tmp_path / "both"))
    assert read_prompts(str(tmp_path / "one"), None) == ["a", "b"]
    assert read_prompts(f"{tmp_path / 'both'}:test", None) == ["c"]
    assert read_prompts(str(tmp_path / "both"), None) == ["a", "b"]
    with pytest.raises(DataError, match="dev"):
        read_prompts(f"{tmp_path / 'both'}:dev", None)
