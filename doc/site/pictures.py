"""Update the pictures of README: python doc/site/pictures.py [RUNS_DIR]

Runs the main job in a pseudo-terminal, and saves screenshots of its last screen and of the
report with headless Chromium, which must be installed.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "doc" / "pictures"
COLUMNS, ROWS = 118, 40
LAST_LINES = 44
"""Lines of the output that the picture shows."""
REPORT_SIZE = (1080, 1250)


def run_in_a_terminal(command: list[str]) -> str:
    """Output of a command in a terminal of `COLUMNS` by `ROWS`, with colours."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    printed = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # Linux says so when the other end is closed
            break
        if not part:
            break
        printed += part
    os.close(ours)
    if process.wait() != 0:
        raise SystemExit(printed.decode(errors="replace"))
    return printed.decode()


def last_screen(printed: str) -> str:
    """The final lines on the screen."""
    lines = []
    # Moves of the cursor, and what hides it.
    printed = re.sub(r"\x1b\[(\d*[AK]|\?25[lh])", "", printed)
    for line in printed.replace("\r\n", "\n").split("\n"):
        versions = [part for part in line.split("\r") if part.strip()]
        lines.append(versions[-1] if versions else "")
    return "\n".join(lines)


def photograph(page: Path, picture: Path, size: tuple[int, int]) -> None:
    """Save a screenshot of a page."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    if browser is None:
        raise SystemExit("no chromium was found; install it, for instance by apt-get")
    with tempfile.TemporaryDirectory() as profile:
        arguments = (
            *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *(f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}"),
            *(f"--screenshot={picture}", page.resolve().as_uri()),
        )
        subprocess.run([browser, *arguments], check=True, capture_output=True)


def main(folder: Path) -> None:
    """Run, and take both pictures."""
    arguments = ["--trainer", "ast_dpo", "--runs-dir", str(folder), "--run-id", "seed0"]
    printed = run_in_a_terminal([sys.executable, str(ROOT / "run.py"), *arguments])
    (folder / "printed.txt").write_text(printed)
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(Text("$ python run.py --trainer ast_dpo", style="bold"))
    shown = last_screen(printed).replace(f"{folder}/", "runs/")
    console.print(Text.from_ansi("\n".join(shown.splitlines()[-LAST_LINES:])))
    drawing = folder / "terminal.svg"
    console.save_svg(str(drawing), title="nip_astra")
    view_box = drawing.read_text().partition('viewBox="0 0 ')[2].partition('"')[0]
    width, height = (round(float(number)) for number in view_box.split())
    photograph(drawing, PICTURES / "terminal.png", (width, height))
    photograph(folder / "seed0" / "report.html", PICTURES / "report.png", REPORT_SIZE)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
