"""C is compiled once and kept; where that fails the caller is told that there is none."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest
import torch

from nip_astra.utils import native_code
from nip_astra.utils.native_code import CACHE, SWITCH, NativeCode, can_read

ADD_ONE = """
#include <stdint.h>

int add_one(intptr_t size, float *x) {
    for (intptr_t i = 0; i < size; i++) x[i] += 1;
    return 0;
}
int add_up(intptr_t count, const float *const *xs, float *sum) {
    for (intptr_t i = 0; i < count; i++) *sum += *xs[i];
    return 0;
}
int lack_memory(void) { return 1; }
"""
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="there is no C compiler"
)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    path = tmp_path / "added.c"
    path.write_text(ADD_ONE)
    native_code._library.cache_clear()
    return path


def compiled_files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "nip_astra" / "native").iterdir())


@needs_compiler
def test_a_function_computes_in_place(source: Path) -> None:
    x = torch.zeros(3)
    NativeCode(source).call("add_one", 2, x)
    assert NativeCode(source).why_absent() is None
    assert x.tolist() == [1, 1, 0]


@needs_compiler
def test_a_function_takes_several_tensors_as_one(source: Path) -> None:
    total = torch.zeros(1)
    NativeCode(source).call("add_up", 2, [torch.tensor([3.0]), torch.tensor([4.0])], total)
    assert total.item() == 7


@needs_compiler
def test_lack_of_memory_is_told(source: Path) -> None:
    with pytest.raises(MemoryError, match="lack_memory of added"):
        NativeCode(source).call("lack_memory")


@needs_compiler
def test_what_was_compiled_is_used_again_until_the_text_changes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert NativeCode(source).library() is not None
    (first,) = compiled_files(tmp_path)
    native_code._library.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(native_code, "_compile", None)
        assert NativeCode(source).library() is not None
    source.write_text(ADD_ONE + "\n")
    native_code._library.cache_clear()
    assert NativeCode(source).library() is not None
    assert len(compiled_files(tmp_path)) == 2
    assert first in compiled_files(tmp_path)


@needs_compiler
def test_code_that_does_not_compile_is_left_to_torch(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source.write_text("int broken(")
    with caplog.at_level(logging.INFO):
        assert NativeCode(source).library() is None
        assert NativeCode(source).library() is None
    (line,) = caplog.messages
    assert line.startswith("added.c is left to torch: the compiler fails: ")
    assert "error" in line
    assert "\n" not in line
    assert compiled_files(tmp_path) == []


def test_without_a_compiler_it_is_left_to_torch(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    with caplog.at_level(logging.INFO):
        assert NativeCode(source).library() is None
    assert caplog.messages == [
        "added.c is left to torch: there is no C compiler (cc, gcc or clang)"
    ]
    assert NativeCode(source).why_absent() == "there is no C compiler (cc, gcc or clang)"


@needs_compiler
@pytest.mark.skipif(os.geteuid() == 0, reason="the root user may write anywhere")
def test_where_nothing_can_be_kept_it_is_left_to_torch(source: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o500)
    assert NativeCode(source).library() is None


@needs_compiler
def test_a_file_that_was_cut_short_is_compiled_anew(source: Path, tmp_path: Path) -> None:
    """Loading one may end the process."""
    assert NativeCode(source).library() is not None
    (path,) = compiled_files(tmp_path)
    whole = path.read_bytes()
    path.unlink()
    path.write_bytes(whole[: len(whole) // 2])
    native_code._library.cache_clear()
    assert NativeCode(source).library() is not None
    assert [kept.stat().st_size for kept in compiled_files(tmp_path)] == [len(whole)]


@needs_compiler
def test_a_folder_that_others_may_write_to_is_not_used(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "nip_astra" / "native"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert NativeCode(source).why_absent() == f"others may write to {folder}"


@needs_compiler
@pytest.mark.parametrize("given", ["{cc} -DNOTHING", "not_a_compiler"])
def test_a_compiler_of_ones_own_may_have_arguments_or_be_missing(
    given: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cc = next(filter(shutil.which, ("cc", "gcc", "clang")))
    monkeypatch.setenv("CC", given.format(cc=cc))
    assert NativeCode(source).why_absent() is None


def test_what_a_compiler_says_may_be_in_any_letters(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\nprintf 'refus\\351\\n' >&2\nexit 1\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    assert NativeCode(source).why_absent() == "the compiler fails: refus\N{REPLACEMENT CHARACTER}"


def test_a_cache_that_is_a_file_is_left_alone(source: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    assert NativeCode(source).library() is None


def test_the_switch_leaves_all_to_torch(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    assert NativeCode(source).library() is None
    assert NativeCode(source).why_absent() == f"{SWITCH} is 0"


def test_only_float32_on_the_processor_is_taken() -> None:
    assert can_read(torch.zeros(2), torch.zeros(3).bool())
    assert not can_read(torch.zeros(2), torch.zeros(2).to_sparse())
    assert not can_read(torch.zeros(2), torch.zeros(2, device="meta"))
