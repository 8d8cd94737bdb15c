"""Prompts are read as they stand, and a file that holds none is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nip_astra.errors import ConfigurationError, DataError
from nip_astra.scenario_base.prompts import read_prompts


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
    # Editors on Windows put a mark before the first character.
    assert read_prompts(written(tmp_path, name, "\ufeff" + text), None) == expected


def test_a_prompt_may_hold_any_character_but_the_end_of_its_line(tmp_path: Path) -> None:
    path = written(tmp_path, "p.jsonl", '{"prompt": "one\u2028two\\nthree \u2603"}\n')
    assert read_prompts(path, None) == ["one\u2028two\nthree \u2603"]
    path = written(tmp_path, "p.txt", "one\u2028two\x0bthree\n")
    assert read_prompts(path, None) == ["one\u2028two\x0bthree"]


def test_a_reference_points_into_the_scenario(tmp_path: Path) -> None:
    written(tmp_path, "p.txt", "hello\n")
    assert read_prompts("scenario://p.txt", tmp_path) == ["hello"]
    with pytest.raises(ConfigurationError, match=r"without one\. Give an absolute path"):
        read_prompts("scenario://p.txt", None)


def test_a_missing_file_is_named_as_it_was_asked_for_and_where_it_was_sought(
    tmp_path: Path,
) -> None:
    with pytest.raises(DataError) as caught:
        read_prompts("scenario://none.txt", tmp_path)
    assert "prompts were to be read from 'scenario://none.txt', but" in str(caught.value)
    assert f"{tmp_path / 'none.txt'} cannot be read: No such file" in str(caught.value)
    assert "Give a .txt, .jsonl or .json file." in str(caught.value)


def test_a_file_that_is_no_text_is_told(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"p\.txt cannot be read: .*utf-8.* Give a \.txt"):
        read_prompts(str(tmp_path / "p.txt"), None)


@pytest.mark.parametrize(
    ("name", "text"),
    [("p.txt", ""), ("p.txt", " \n\n"), ("p.jsonl", "\n"), ("p.jsonl", '{"prompt": " "}'),
     ("p.json", "[]")],
)  # fmt: skip
def test_a_file_without_prompts_is_told(tmp_path: Path, name: str, text: str) -> None:
    path = written(tmp_path, name, text)
    message = f"prompts were to be read from {path!r}, but {path} holds none. Give at least one"
    with pytest.raises(DataError, match=re.escape(message)):
        read_prompts(path, None)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("p.jsonl", '{"prompt": "a"}\nhello\n', "line 2: Expecting value"),
        ("p.jsonl", '{"prompt": "a"}\n\n{"text": "b"}\n', "line 3: it has no 'prompt'"),
        ("p.jsonl", '["a"]\n', "line 1: it has no 'prompt'"),
        ("p.jsonl", '{"prompt": null}\n', "line 1: its prompt is null and no text"),
        ("p.jsonl", '{"prompt": 3}\n', "line 1: its prompt is 3 and no text"),
        ("p.json", '{"prompt": "a"}', "it is no list"),
        ("p.json", '"hello"', "it is no list"),
        ("p.json", '["a", null]', "item 2: its prompt is null and no text"),
        ("p.json", "[", "Expecting value"),
    ],
)
def test_a_file_that_cannot_be_parsed_is_told_with_the_line(
    tmp_path: Path, name: str, text: str, problem: str
) -> None:
    path = written(tmp_path, name, text)
    with pytest.raises(DataError) as caught:
        read_prompts(path, None)
    assert f"the prompt file {path} cannot be parsed: {problem}" in str(caught.value)
    assert 'A .jsonl file holds one {"prompt": "..."} a line, a .json file a list of strings' in (
        str(caught.value)
    )
