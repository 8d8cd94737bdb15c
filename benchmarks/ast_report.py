"""The figures of `ast_speed.py`: ratios, and tables in Markdown; all else is in its JSON."""

from __future__ import annotations

from collections.abc import Sequence

from ast_contest import PARTS, PLAIN, Figures
from measuring import markdown_table

FACTS = ("model", "num_threads", "tree", "episodes", "context", "mode")
MEMORY = ("after_loading", "peak_of_rollout", "peak_of_iteration", "peak", "peak_on_device")
TRL = ("model", "mode", "precision", "trl_seconds", "our_seconds", "ratio")


def ratios(record: Figures) -> list[Figures]:
    """One flat row for each part and precision of a measured setting."""
    setting, rows = record["setting"], []
    facts = {**setting, "tree": f"{setting['width']}x{setting['depth']}"}
    for part in PARTS:
        # A whole iteration begins with a rollout.
        held = record["parts"].get("iteration" if part == "rollout" else part)
        measured = record["parts"].get(part) or held
        for precision, ours in (measured or {}).items():
            if precision == PLAIN:
                continue
            plain = measured[PLAIN]
            slow, fast = _seconds_of(plain, part), _seconds_of(ours, part)
            units = ours["num_pairs"] if part == "update" else setting["num_generated_tokens"]
            row = {name: facts[name] for name in FACTS} | {
                "precision": precision,
                "part": part,
                "is_scaled": plain["is_scaled"],
                "plain_seconds": slow,
                "our_seconds": fast,
                "ratio": slow / fast,
                "plain_rate": units / slow,
                "our_rate": units / fast,
            }
            if part != "iteration":
                row |= {"plain_per_unique": _per_unique(plain), "our_per_unique": _per_unique(ours)}
            rows.append(row)
    return rows


def _seconds_of(figures: Figures, part: str) -> float:
    """The seconds of a part; an iteration is its rollout and its updates."""
    phases = figures["phases"]
    return phases["rollout"] + phases["update"] if part == "iteration" else phases[part]


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
        "log-probabilities by a pass of their own, updates of one pair. Ours: `ast_dpo`. Medians.",
        f"Measured with `{report['command']}` on {environment['machine']}, "
        f"torch {packages['torch']}, transformers {packages['transformers']}.",
    ]
    if report["ratios"]:
        sections.append(_ratio_table(report["ratios"]))
    if report["memory"]:
        rows = [
            [record["label"], way, *(_mebibytes(figures.get(name)) for name in MEMORY)]
            for record in report["memory"]
            for way, figures in record["ways"].items()
        ]
        header = ("setting", "way", *(f"{name.replace('_', ' ')}, MiB" for name in MEMORY))
        sections.append(markdown_table(header, rows))
    if report["trl"]:
        rows = [[row[name] for name in TRL] for row in report["trl"]]
        header = ("model", "trained", "both in", "TRL OnlineDPO, s a step", "ours, s", "ratio")
        sections.append(markdown_table(header, rows))
    sections += [f"Skipped: {text}" for text in report["skipped"]]
    return "\n\n".join(section.strip("\n") for section in sections) + "\n"


def _ratio_table(rows: Sequence[Figures]) -> str:
    header = (
        *("model", "threads", "tree", "episodes", "context", "trained", "ours in", "part"),
        *("plain, s", "ours, s", "ratio", "plain a second", "ours a second"),
        *("plain forwarded per unique", "ours forwarded per unique"),
    )
    names = ("precision", "part", "plain_seconds", "our_seconds", "ratio", "plain_rate", "our_rate")
    cells = [
        [row.get(name) for name in (*FACTS, *names, "plain_per_unique", "our_per_unique")]
        for row in rows
    ]
    for row, shown in zip(rows, cells, strict=True):
        if row["is_scaled"]:
            shown[header.index("plain, s")] = f"{row['plain_seconds']:.3g} (scaled)"
    note = (
        "A second: tokens said, of rollouts and iterations; pairs, of updates. Forwarded per "
        "unique: positions that went through the models, by the tokens that each must read once. "
        "Scaled: measured over fewer episodes, which the plain way plays one by one."
    )
    return f"{markdown_table(header, cells)}\n{note}"


def _mebibytes(value: int | None) -> int | None:
    return None if value is None else round(value / 2**20)
