"""The figures of `ast_speed.py` as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from ast_contest import PLAIN, Figures
from measuring import markdown_table

_MIB = 2**20
TOTALS = ("rollout", "update")
"""Phases that hold the others."""


def seconds_of(figures: Figures, part: str) -> float:
    """The seconds of a part; an iteration is its rollout and its updates."""
    phases = figures["phases"]
    return phases["rollout"] + phases["update"] if part == "iteration" else phases[part]


def ratios(record: Figures) -> list[Figures]:
    """One flat row for each part and precision of a measured setting."""
    rows = []
    setting = record["setting"]
    generated = setting["num_generated_tokens"]
    names = ("model", "num_threads", "episodes", "context", "mode")
    for part in ("rollout", "update", "iteration"):
        measured = record["parts"].get(part)
        if measured is None and part == "rollout":
            # A whole iteration begins with one.
            measured = record["parts"].get("iteration")
        if measured is None:
            continue
        plain = measured[PLAIN]
        for precision, ours in measured.items():
            if precision == PLAIN:
                continue
            units = ours["num_pairs"] if part == "update" else generated
            rows.append(
                {
                    **{name: setting[name] for name in names},
                    "tree": f"{setting['width']}x{setting['depth']}",
                    "precision": precision,
                    "part": part,
                    "is_scaled": plain["is_scaled"],
                    **_compare(part, plain, ours, units),
                }
            )
    return rows


def _compare(part: str, plain: Figures, ours: Figures, units: int) -> Figures:
    slow, fast = seconds_of(plain, part), seconds_of(ours, part)
    figures: Figures = {
        "plain_seconds": slow,
        "our_seconds": fast,
        "ratio": slow / fast,
        "plain_rate": units / slow,
        "our_rate": units / fast,
    }
    if part != "iteration":
        figures |= {
            "plain_per_unique": _per_unique(plain),
            "our_per_unique": _per_unique(ours),
        }
    return figures


def _per_unique(figures: Figures) -> float:
    roles = figures["unique"]
    forwarded = sum(figures["work"][role]["forwarded"] for role in roles)
    return float(forwarded / sum(roles.values()))


def markdown(report: Figures) -> str:
    """The whole report."""
    environment = report["environment"]
    packages = environment["packages"]
    sections = [
        "Plain: depth first, one group of siblings at a time, three models in float32, `generate`, "
        "log-probabilities by a pass of their own, updates of one pair. Ours: `ast_dpo`. "
        "Medians; seconds.",
        f"Measured with `{report['command']}` on {environment['machine']}, "
        f"torch {packages['torch']}, transformers {packages['transformers']}.",
    ]
    if report["settings"]:
        rows = [row for record in report["settings"] for row in ratios(record)]
        sections += [_ratio_table(rows), _phase_table(report["settings"])]
        sections += [_work_table(report["settings"]), _deviation_table(report["settings"])]
    if report["memory"]:
        sections.append(_memory_table(report["memory"]))
    if report["trl"]:
        sections.append(_trl_table(report["trl"]))
    if report["skipped"]:
        listed = "\n".join(f"- {text}" for text in report["skipped"])
        sections.append(f"Skipped, for want of a package:\n\n{listed}\n")
    return "\n\n".join(section.strip("\n") for section in sections if section) + "\n"


def _ratio_table(rows: Sequence[Figures]) -> str:
    header = (
        *("model", "threads", "tree", "episodes", "context", "trained", "ours in", "part"),
        *("plain, s", "ours, s", "ratio", "plain a second", "ours a second"),
        *("plain forwarded per unique", "ours forwarded per unique"),
    )
    cells = [
        [
            *(
                row[name]
                for name in ("model", "num_threads", "tree", "episodes", "context", "mode")
            ),
            *(row[name] for name in ("precision", "part")),
            f"{row['plain_seconds']:.3g} (scaled)" if row["is_scaled"] else row["plain_seconds"],
            *(row[name] for name in ("our_seconds", "ratio", "plain_rate", "our_rate")),
            *(row.get(name) for name in ("plain_per_unique", "our_per_unique")),
        ]
        for row in rows
    ]
    note = (
        "A second: tokens said, of rollouts and iterations; pairs, of updates. Forwarded per "
        "unique: positions that went through the models, by the tokens that each model must read "
        "once. An update has the same pairs in both, one at a time and all at once; ours has the "
        "reference's log-probabilities from the rollout."
    )
    if any(row["is_scaled"] for row in rows):
        note += " Scaled: measured over fewer episodes, which the plain way plays one by one."
    return f"{markdown_table(header, cells)}\n{note}"


def _phase_table(settings: Sequence[Figures]) -> str:
    rows = []
    for record in settings:
        for part, measured in _parts(record):
            for way, figures in measured.items():
                total = seconds_of(figures, part)
                for name, seconds in figures["phases"].items():
                    if not (name == part or (way == PLAIN and name in TOTALS)):
                        rows.append([_label(record), part, way, name, seconds, seconds / total])
    return markdown_table(("setting", "part", "way", "phase", "s", "share"), rows)


def _work_table(settings: Sequence[Figures]) -> str:
    counts = ("forwarded", "head_rows", "generated")
    rows = []
    for record in settings:
        for part, measured in _parts(record):
            for way, figures in measured.items():
                for role, work in figures["work"].items():
                    if any(work.values()):
                        unique = figures["unique"].get(role)
                        cells = [work.get(name) for name in counts]
                        rows.append([_label(record), part, way, role, unique, *cells])
    names = ("unique tokens", "forwarded", "head rows", "said")
    return markdown_table(("setting", "part", "way", "model", *names), rows)


def _deviation_table(settings: Sequence[Figures]) -> str:
    rows = [
        [_label(record), precision, *values.values()]
        for record in settings
        for precision, values in record["parts"].get("deviation", {}).items()
    ]
    header = (
        "setting",
        "ours in",
        "loss differs by",
        "gradient, relative",
        "in the worst parameter",
    )
    return markdown_table(header, rows) if rows else ""


def _memory_table(memory: Sequence[Figures]) -> str:
    names = ("before_loading", "after_loading", "peak_while_loading")
    names += ("peak_of_rollout", "peak_of_iteration", "peak", "peak_on_device")
    rows = [
        [_label(record), way, *(_mebibytes(figures.get(name)) for name in names)]
        for record in memory
        for way, figures in record["ways"].items()
    ]
    header = ("setting", "way", *(f"{name.replace('_', ' ')}, MiB" for name in names))
    return markdown_table(header, rows)


def _trl_table(rows: Sequence[Figures]) -> str:
    names = ("model", "mode", "precision", "trl_seconds", "our_seconds", "ratio")
    header = ("model", "trained", "both in", "TRL OnlineDPO, s a step", "ours, s", "ratio")
    note = (
        f"{rows[0]['num_prompts']} prompts of {rows[0]['prompt_tokens']} tokens, template "
        f"included, and 2 samples of {rows[0]['new_tokens']}; TRL {rows[0]['version']}. Ours is a "
        "tree of depth 1, whose target reads each sample and says one token."
    )
    return f"{markdown_table(header, [[row[name] for name in names] for row in rows])}\n{note}"


def _parts(record: Figures) -> list[tuple[str, Figures]]:
    return [(part, found) for part, found in record["parts"].items() if part != "deviation"]


def _label(record: Figures) -> str:
    return str(record["label"])


def _mebibytes(value: int | None) -> int | None:
    return None if value is None else round(value / _MIB)
