"""Tests of the page in a real browser."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from nip_astra.report.page import write_report
from tests.report.browser import Browser, find_chromium
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


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_chromium()
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


def test_conversations_and_turns_open_and_are_filtered_by_a_click(
    browser: Browser, page: Path
) -> None:
    browser.open(page)
    conversations = "#conversations details.table[open] .e"
    assert visible(browser, conversations) == 20
    browser.click("#conversations .choose")
    assert visible(browser, conversations) == 1, "with a failure"
    tree_of_training = "#conversations details.table:nth-of-type(2)"
    browser.click(f"{tree_of_training} > summary")
    browser.click(f"{tree_of_training} details.e > summary")
    closed = f"{tree_of_training} details.n:not([open])"
    num_closed = browser.value(f"document.querySelectorAll({closed!r}).length")
    browser.click(f"{closed} > summary")
    assert browser.value(f"document.querySelectorAll({closed!r}).length") == num_closed - 1
    seen = f"{tree_of_training} details.n[open] .n"
    assert browser.value(f"document.querySelector({seen!r}).getBoundingClientRect().height") > 20


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


def test_an_episode_of_a_protocol_opens_by_a_click(browser: Browser, protocol_page: Path) -> None:
    browser.open(protocol_page)
    assert visible(browser, "#episodes .ep svg") == 3, "two graphs and an image"
    browser.click("#episodes .ep > summary")
    assert visible(browser, "#episodes .ep svg") == 1


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
            is_right = problem % 10 > (0 if table == "evaluation" else 4)
            answer = ["assistant", ATTACK if problem == 10 else f"answer {problem}"]
            messages = [["user", f"problem {problem}"], answer]
            rows.append({"step": 9, "problem": problem, "reward": float(is_right),
                         "is_right": is_right, "messages": messages})  # fmt: skip
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
    for seed in range(9):
        after = {"failure_rate": seed / 10, "num_failed": seed, "num_known": 10}
        after |= {"failure_rate_interval": [0.125, 0.875]}
        results = {"kind": "conversation", "before": after, "after": after}
        results |= {"status": "failed"} if seed == 8 else {}
        long = "2026-11-26-self_hosted_grpo-graph_isomorphism-lr=1e-4"
        name = {7: long, 8: "sweep/s8"}.get(seed, f"r{seed}")
        write_run(folder / name, seed=seed, results=results)
    write_report([folder / "r1"])
    (folder / "notes").mkdir()
    return write_report([folder])


def test_runs_of_a_folder_are_sorted_filtered_and_drawn(browser: Browser, runs_page: Path) -> None:
    assert runs_page.name == "report.html"
    browser.open(runs_page)
    names = (
        "[...document.querySelectorAll('.catalogue tbody tr:not([hidden]) th')]"
        ".map(e => e.textContent)"
    )
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
