"""The page in a headless Chromium, driven through its debugging pipe without a package."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nip_astra.report.page import write_report
from tests.report.runs import (
    ATTACK,
    chains,
    episode,
    evaluation,
    failing,
    image,
    move,
    row,
    tree,
    write_protocol_run,
    write_run,
)
from tests.report.test_failures import plant

NAMES = ("chromium", "chromium-browser", "google-chrome")


class Browser:
    """One page of a headless browser; messages are JSON with a NUL at the end."""

    def __init__(self, program: str, profile: Path) -> None:
        to_child, self._out = os.pipe()
        self._in, from_child = os.pipe()
        # Away from 3 and 4, which become the child's ends.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 50) for end in (to_child, from_child)]

        def arrange() -> None:
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        self._process = subprocess.Popen(
            [
                *(program, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
                *("--disable-background-networking", "--disable-dev-shm-usage"),
                *("--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=arrange,
        )
        for end in (to_child, from_child, *ends):
            os.close(end)
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        targets = self.ask("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        attached = self.ask("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result; earlier events are kept."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            received = self._receive()
            if received.get("id") == self._number:
                assert "error" not in received, received
                return received["result"]
            self.events.append(received)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            read = os.read(self._in, 1 << 16)
            assert read, "the browser has ended"
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def open(
        self, path: Path, *, width: int = 1280, height: int = 900, scheme: str = "light"
    ) -> None:
        """Show a file and wait until it has loaded."""
        self.events.clear()
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("Emulation.setEmulatedMedia", features=features)
        self.ask("Page.navigate", url=path.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive())

    def complaints(self) -> list[str]:
        """Output of the console: messages, faults and blocked resources."""
        shown = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
        return [json.dumps(event) for event in self.events if event.get("method") in shown]

    def requests(self) -> list[str]:
        """The addresses that the page requested."""
        sent = [
            event for event in self.events if event.get("method") == "Network.requestWillBeSent"
        ]
        return [event["params"]["request"]["url"] for event in sent]

    def value(self, expression: str) -> Any:
        """Evaluate the test's own JavaScript."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def click(self, selector: str, place: int = 0) -> None:
        """Click into the middle of an element, like a reader."""
        box = self.value(
            f"(() => {{ const e = document.querySelectorAll({json.dumps(selector)})[{place}];"
            "e.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const b = e.getBoundingClientRect();"
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.ask(
                "Input.dispatchMouseEvent",
                type=kind, x=box[0], y=box[1], button="left", clickCount=1,
            )  # fmt: skip

    def screenshot(self) -> bytes:
        """The visible part of the page as PNG."""
        return base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"])

    def close(self) -> None:
        self._session = None
        self.ask("Browser.close")
        self._process.wait(timeout=30)
        os.close(self._out)
        os.close(self._in)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = next((path for name in NAMES if (path := shutil.which(name))), None)
    if program is None:
        pytest.skip("chromium is not installed: apt-get install chromium fonts-dejavu-core")
    opened = Browser(program, tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


def visible(browser: Browser, selector: str) -> int:
    """The number of visible elements."""
    shown = f"[...document.querySelectorAll({selector!r})].filter(e => e.checkVisibility())"
    return int(browser.value(f"{shown}.length"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    attacked = failing(ATTACK, response=ATTACK, prompt=ATTACK, episode=50)
    return write_run(
        tmp_path_factory.mktemp("runs") / "one",
        tables={"train": tree(3, 3), "evaluation": [*chains(30), attacked]},
        evaluations={"held_out": evaluation()},
    )


@pytest.fixture(scope="module")
def page(run: Path) -> Path:
    return write_report([run])


def test_a_page_keeps_to_its_policy(browser: Browser, page: Path, tmp_path: Path) -> None:
    browser.open(page)
    assert browser.value("document.title") == "ast_dpo on pocket_chat"
    assert browser.value("document.querySelectorAll('script').length") == 1, "the page's own"
    assert browser.value("document.querySelectorAll('img').length") == 0
    assert ATTACK in browser.value("document.querySelector('#conversations').textContent")
    # A page that violates the policy is noticed.
    policy = "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'\">"
    (tmp_path / "bad.html").write_text(f"{policy}<script>1</script><p style='color:red'>a")
    browser.open(tmp_path / "bad.html")
    assert len(browser.complaints()) == 2


def test_conversations_turns_and_episodes_open_and_are_filtered_by_a_click(
    browser: Browser, page: Path, protocol_page: Path
) -> None:
    browser.open(protocol_page)
    assert visible(browser, "#episodes .ep svg") == 3, "two graphs and an image"
    browser.click("#episodes .ep > summary")
    assert visible(browser, "#episodes .ep svg") == 1
    browser.open(page)
    conversations = "#conversations details.table[open] .e"
    assert visible(browser, conversations) == 20
    browser.click("#conversations .choose")
    assert visible(browser, conversations) == 1, "with a failure"
    training = "#conversations details.table:nth-of-type(2)"
    for part in (training, f"{training} details.e"):
        browser.click(f"{part} > summary")
    num_visible = visible(browser, f"{training} .n .n")
    browser.click(f"{training} details.n:not([open]) > summary")
    assert visible(browser, f"{training} .n .n") > num_visible


@pytest.fixture(scope="module")
def protocol_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    channels = ["main", "adversarial_main"]
    moves = [move("verifier", 5, messages={name: [5, 6] for name in channels}, decision=2)]
    rows = [
        episode(0, symbols=[1, 9, 1, 9, 3]),
        episode(1, label=0, datapoint=image(), rounds=[{"round": 0, "moves": moves}]),
    ]
    return write_report(
        [write_protocol_run(tmp_path_factory.mktemp("runs") / "two", tables={"evaluation": rows})]
    )


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (360, "dark")])
@pytest.mark.parametrize("kind", ["page", "protocol_page", "runs_page"])
def test_the_page_fits_the_window_fetches_nothing_and_is_not_blank(
    browser: Browser, request: pytest.FixtureRequest, kind: str, scheme: str, width: int
) -> None:
    page = request.getfixturevalue(kind)
    browser.open(page, width=width, scheme=scheme)
    assert browser.complaints() == []
    assert browser.requests() == [page.resolve().as_uri()]
    assert browser.value("document.documentElement.scrollWidth") <= width
    # Wider content scrolls within itself.
    outside = "e => e.getBoundingClientRect().right > innerWidth && !e.closest('.scroll, nav, svg')"
    assert browser.value(f"[...document.querySelectorAll('body *')].filter({outside}).length") == 0
    background = browser.value("getComputedStyle(document.body).backgroundColor")
    red = int(background.partition("(")[2].partition(",")[0])
    assert (red > 200) is (scheme == "light")
    # A window of a single colour takes about 5 kB.
    assert len(browser.screenshot()) > 20_000


def test_a_blurred_text_is_shown_by_a_click_and_all_of_them_by_the_box(
    browser: Browser, run: Path, tmp_path: Path
) -> None:
    browser.open(write_report([run], tmp_path / "veiled.html"))
    text = "#failures .x"
    blur = f"getComputedStyle(document.querySelector({text!r})).filter"
    assert browser.value(blur).startswith("blur(")
    browser.click(text)
    assert browser.value(blur) == "none"
    browser.click("h1")
    assert browser.value(blur).startswith("blur(")
    browser.click("#unveil")
    still = "[...document.querySelectorAll('.x')].filter(e => getComputedStyle(e).filter != 'none')"
    assert browser.value(f"{still}.length") == 0
    assert browser.complaints() == []


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of 30 harmless conversations, and of two that fail at turns 3 and 1."""
    late = [row(episode=40, depth=turn, prompt="late") for turn in range(2)]
    late.append(failing("do you always eat ?", episode=40, depth=2, prompt="late", logprob=-2.0))
    early = failing("why so silly ?", episode=50, prompt="early", response_score=0.7)
    folder = write_run(
        tmp_path_factory.mktemp("runs") / "three",
        tables={"evaluation": [*chains(30), *late, early]},
    )
    return write_report([plant(folder, {"name": "food", "probe": "always"})])


SHOWN = (
    "[...document.querySelectorAll('#conversations details.table[open] .e')]"
    ".filter(e => e.checkVisibility()).map(e => e.id.split('-').pop())"
)


def use(browser: Browser, tool: str, value: str) -> None:
    """Set a tool of the search, like a reader."""
    browser.value(
        f"(() => {{ const e = document.querySelector('[data-tool={tool}]'); e.value = {value!r};"
        "e.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )


@pytest.mark.parametrize(
    ("tool", "value", "shown"),
    [
        ("words", "ALWAYS eat", ["40"]),
        ("from", "0.65", ["40", "50"]),
        ("plant", "0", ["40"]),
        ("cluster", "1", ["50"]),
    ],
)
def test_conversations_are_found_by_text_score_plant_and_cluster(
    browser: Browser, searched: Path, tool: str, value: str, shown: list[str]
) -> None:
    browser.open(searched)
    assert len(browser.value(SHOWN)) == 20
    use(browser, tool, value)
    assert browser.value(SHOWN) == shown
    shown_of_all = f"{len(shown)} of 32 conversations"
    assert browser.value("document.querySelector('.tools output').textContent") == shown_of_all
    browser.click("[data-tool=reset]")
    assert len(browser.value(SHOWN)) == 32
    assert browser.complaints() == []


def test_conversations_are_sorted_and_reached_by_links(browser: Browser, searched: Path) -> None:
    browser.open(searched)
    for order, first in (("t", ["50", "40"]), ("s", ["40", "50"]), ("", ["0", "1"])):
        use(browser, "order", order)
        assert browser.value(SHOWN)[:2] == first
    assert browser.value(SHOWN)[-1] == "50"
    browser.click("#failures a.only")
    assert browser.value(SHOWN) == ["40"]
    browser.open(searched)
    # Far down the list, in a closed section.
    browser.value("location.hash = 'conversations-evaluation-4-7-t2'")
    turn = "document.getElementById('conversations-evaluation-4-7-t2')"
    for _ in range(50):
        if browser.value(f"{turn}.checkVisibility()"):
            break
    assert browser.value(f"{turn}.closest('.e').open")
    assert browser.value(f"getComputedStyle({turn}).outlineStyle") == "solid"


def test_a_page_can_be_read_without_its_script_and_is_printed_without_controls(
    browser: Browser, searched: Path, tmp_path: Path
) -> None:
    source = searched.read_text()
    script = source[source.index("<script>") : source.index("</script>") + len("</script>")]
    (tmp_path / "plain.html").write_text(source.replace(script, ""))
    browser.open(tmp_path / "plain.html")
    assert not browser.value("document.querySelector('.tools').checkVisibility()")
    assert len(browser.value(SHOWN)) == 20
    browser.click("#conversations .e > summary")
    assert browser.value("document.querySelector('.e .n').checkVisibility()")
    browser.open(searched)
    browser.ask("Emulation.setEmulatedMedia", media="print")
    assert visible(browser, "nav, .tools, #unveil, .choose") == 0
    browser.ask("Emulation.setEmulatedMedia", media="")


@pytest.fixture(scope="module")
def task_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of 3,000 answers, of which every tenth is wrong."""
    folder = tmp_path_factory.mktemp("runs") / "task"
    tables: dict[str, list[dict[str, object]]] = {"before": [], "evaluation": []}
    for table, rows in tables.items():
        for problem in range(3000):
            is_correct = problem % 10 > (0 if table == "evaluation" else 4)
            answer = ["assistant", ATTACK if problem == 10 else f"answer {problem}"]
            messages = [["user", f"problem {problem}"], answer]
            rows.append({"step": 9, "problem": problem, "reward": float(is_correct),
                         "is_correct": is_correct, "messages": messages})  # fmt: skip
    results = {"kind": "task", "after": {"accuracy": 0.9, "num_problems": 3000}}
    return write_report([write_run(folder, tables=tables, results=results)])


def test_thousands_of_answers_are_filtered_and_paged_through(
    browser: Browser, task_page: Path
) -> None:
    browser.open(task_page)
    assert browser.complaints() == []
    shown = "[...document.querySelectorAll('#answers .e .said')].map(e => e.textContent)"
    output = "document.querySelector('#answers output').textContent"
    assert len(browser.value(shown)) == 20
    use(browser, "kind", "every:wrong")
    assert browser.value(output) == "1 to 20 of 300"
    browser.click("[data-tool=on]")
    assert browser.value(shown)[0] == "problem 200"
    use(browser, "words", "problem 10")
    assert browser.value(shown)[0] == "problem 10"
    browser.click("#answers .e > summary")
    assert ATTACK in browser.value("document.querySelector('#answers .e').textContent")
    assert browser.value("document.querySelectorAll('#answers .e :is(img, script)').length") == 0
    use(browser, "words", "")
    use(browser, "kind", "fixed")
    started = browser.value("performance.now()")
    use(browser, "order", "long")
    assert browser.value("performance.now()") - started < 1000
    assert browser.value(output) == "1 to 20 of 1200"


@pytest.fixture(scope="module")
def runs_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of nine stress tests, one of a failed sweep, and of a folder that is not a run."""
    folder = tmp_path_factory.mktemp("all") / "runs"
    long = "2026-11-26-self_hosted_grpo-graph_isomorphism-lr=1e-4"
    for seed in range(9):
        after = {"failure_rate": seed / 10, "num_failed": seed, "num_known": 10}
        after |= {"failure_rate_interval": [0.125, 0.875]}
        results = {"kind": "conversation", "before": after, "after": after}
        results |= {"status": "failed"} if seed == 8 else {}
        name = {7: long, 8: "sweep/s8"}.get(seed, f"r{seed}")
        write_run(folder / name, seed=seed, results=results)
    write_report([folder / "r1"])
    (folder / "notes").mkdir()
    return write_report([folder])


def test_runs_of_a_folder_are_sorted_filtered_and_drawn(browser: Browser, runs_page: Path) -> None:
    assert runs_page.name == "report.html"
    browser.open(runs_page)
    rows = "[...document.querySelectorAll('.catalogue tbody tr:not([hidden]) th')]"
    names = f"{rows}.map(e => e.textContent)"
    assert len(browser.value(names)) == 9
    table = "document.querySelector('.catalogue .scroll')"
    assert browser.value(f"{table}.scrollWidth <= {table}.clientWidth")
    lines = "document.querySelectorAll('.catalogue svg .line').length"
    assert browser.value(lines) == 9
    after = (
        "[...document.querySelectorAll('thead button')].findIndex(e => e.textContent == 'after')"
    )
    for first in ("r0", "sweep/s8"):
        browser.click(".catalogue thead button", after)
        assert browser.value(names)[0] == first
    use(browser, "status", "failed")
    assert browser.value(names) == ["sweep/s8"]
    assert browser.value(lines) == 1
    browser.click("[data-tool=reset]")
    links = "[...document.querySelectorAll('.catalogue tbody a')].map(e => e.getAttribute('href'))"
    assert browser.value(links) == ["r1/report.html"]


def find_axe() -> Path | None:
    """Locate axe-core where npm installs it, or at AXE_CORE."""
    named = [os.environ["AXE_CORE"]] if "AXE_CORE" in os.environ else []
    roots = [Path.cwd(), *Path.cwd().parents, Path.home(), Path("/usr/lib"), Path("/usr/local/lib")]
    installed = [root / "node_modules" / "axe-core" / "axe.min.js" for root in roots]
    return next((path for path in [*map(Path, named), *installed] if path.is_file()), None)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("kind", ["page", "searched", "protocol_page", "task_page", "runs_page"])
def test_axe_finds_no_fault(
    browser: Browser, request: pytest.FixtureRequest, kind: str, scheme: str, width: int
) -> None:
    axe = find_axe()
    if axe is None:
        pytest.skip("axe-core is not installed: npm install axe-core, or set AXE_CORE")
    browser.open(request.getfixturevalue(kind), width=width, scheme=scheme)
    browser.value("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    browser.value(f"{axe.read_text()};0")
    check = (
        "axe.run(document, {resultTypes: ['violations']}).then(found => JSON.stringify("
        "found.violations.map(one => [one.id, one.nodes.map(node => node.html.slice(0, 200))])))"
    )
    answer = browser.ask("Runtime.evaluate", expression=check, awaitPromise=True)
    assert json.loads(answer["result"]["value"]) == []
