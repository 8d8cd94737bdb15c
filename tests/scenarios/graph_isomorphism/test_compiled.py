"""C is compiled once and cached; if this fails, the caller gets None."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch

from nip_astra.scenarios.graphs import compiled as native_code
from nip_astra.scenarios.graphs.compiled import CACHE, NativeCode
from tests.kit.messages import says

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
pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="there is no C compiler"
)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    path = tmp_path / "added.c"
    path.write_text(ADD_ONE)
    forget()
    return path


def compiled_files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "nip_astra" / "native").glob("*"))


def forget() -> None:
    """Simulate a new process's first call in this process."""
    native_code._library.cache_clear()


def test_functions_compute_in_place_accept_tensor_lists_and_report_lack_of_memory(
    source: Path,
) -> None:
    code, x, total = NativeCode(source), torch.zeros(3), torch.zeros(1)
    code.call("add_one", 2, x)
    assert code.why_absent() is None
    assert x.tolist() == [1, 1, 0]
    code.call("add_up", 2, [torch.tensor([3.0]), torch.tensor([4.0])], total)
    assert total.item() == 7
    with pytest.raises(MemoryError, match="lack_memory of added"):
        code.call("lack_memory")


def test_compiled_code_is_reused_until_the_text_changes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert NativeCode(source).library() is not None
    (first,) = compiled_files(tmp_path)
    forget()
    with monkeypatch.context() as patch:
        patch.setattr(native_code, "_compile", None)
        assert NativeCode(source).library() is not None
    source.write_text(ADD_ONE + "\n")
    forget()
    assert NativeCode(source).library() is not None
    assert len(compiled_files(tmp_path)) == 2
    assert first in compiled_files(tmp_path)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("wrong code", "error"),
        ("output in any encoding", "refus\N{REPLACEMENT CHARACTER}"),
        ("no compiler", "cc, gcc or clang"),
    ],
)
def test_code_that_cannot_be_compiled_is_left_to_torch_with_the_reason(
    how: str,
    reason: str,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if how == "wrong code":
        source.write_text("int broken(")
    elif how == "no compiler":
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setenv("PATH", "")
    else:
        compiler = tmp_path / "compiler"
        compiler.write_text("#!/bin/sh\nprintf 'refus\\351\\nmore\\n' >&2\nexit 1\n")
        compiler.chmod(0o700)
        monkeypatch.setenv("CC", str(compiler))
    with caplog.at_level(logging.INFO):
        assert NativeCode(source).library() is None
        assert NativeCode(source).library() is None
    (line,) = caplog.messages
    assert says(line, "added.c", reason)
    assert "\n" not in line
    assert says(NativeCode(source).why_absent(), reason)
    assert compiled_files(tmp_path) == []


@pytest.mark.parametrize("how", ["cut short", "other bytes", "a link", "of others"])
def test_a_file_that_differs_from_the_compiled_one_is_compiled_again(
    how: str, source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Loading such a file might end the process, or run foreign code."""
    assert NativeCode(source).library() is not None
    (path,) = compiled_files(tmp_path)
    whole = path.read_bytes()
    path.unlink()
    if how == "cut short":
        path.write_bytes(whole[: len(whole) // 2])
    elif how == "other bytes":
        path.write_bytes(bytes(len(whole)))
    elif how == "a link":
        (tmp_path / "elsewhere").write_bytes(whole)
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.write_bytes(whole)
        path.chmod(0o666)
    forget()
    x = torch.zeros(1)
    NativeCode(source).call("add_one", 1, x)
    assert x.item() == 1
    (kept,) = compiled_files(tmp_path)
    assert not kept.is_symlink()
    assert kept.stat().st_mode & 0o777 == 0o500
    assert hashlib.sha256(kept.read_bytes()).hexdigest() in kept.name
    assert any("compiled again" in line for line in caplog.messages)


def test_the_loaded_file_is_the_checked_file(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that takes the name in between is not loaded."""
    verified = native_code._open_verified

    def then_exchanged(path: Path) -> int | None:
        descriptor = verified(path)
        path.unlink()
        path.write_bytes(b"no library")
        return descriptor

    monkeypatch.setattr(native_code, "_open_verified", then_exchanged)
    other = tmp_path / "lacking.c"
    other.write_text("int lack_more(void) { return 1; }")
    for file, function in ((source, "lack_memory"), (other, "lack_more")):
        with pytest.raises(MemoryError, match=function):
            NativeCode(file).call(function)


@pytest.mark.parametrize("folder", ["", "cache", "cache/nip_astra", "cache/nip_astra/native"])
@pytest.mark.parametrize("whose", ["writable by others", "of somebody else"])
def test_nothing_is_kept_below_a_folder_of_others(
    whose: str, folder: str, source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache" / "nip_astra" / "native").mkdir(parents=True)
    if whose == "writable by others":
        (tmp_path / folder).chmod(0o777)
    elif folder and os.geteuid() == 0:
        os.chown(tmp_path / folder, 12345, 12345)
    else:
        pytest.skip("only the root user gives folders away")
    with caplog.at_level(logging.INFO):
        assert NativeCode(source).why_absent() is None
    assert says(caplog.text, tmp_path / folder)
    assert compiled_files(tmp_path) == []


def test_folders_are_made_for_this_user_alone_where_others_may_add_but_not_exchange(
    source: Path, tmp_path: Path
) -> None:
    tmp_path.chmod(0o1777)
    before = os.umask(0)
    try:
        assert NativeCode(source).why_absent() is None
    finally:
        os.umask(before)
    (path,) = compiled_files(tmp_path)
    for made in path.parents[:3]:
        assert made.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("given", ["{cc} -DNOTHING", "not_a_compiler"])
def test_a_custom_compiler_has_arguments_or_is_missing_and_a_cache_may_be_a_file(
    given: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cc = next(filter(shutil.which, ("cc", "gcc", "clang")))
    monkeypatch.setenv("CC", given.format(cc=cc))
    (tmp_path / "cache").write_text("kept")
    assert NativeCode(source).why_absent() is None
    assert (tmp_path / "cache").read_text() == "kept"
