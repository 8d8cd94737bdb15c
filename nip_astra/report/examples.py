"""Show a failure with the whole conversation that led to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nip_astra.report.conversations import Table
from nip_astra.report.paths import Key, Paths, key_of, label_of
from nip_astra.report.records import Node, RunRecord
from nip_astra.report.wording import decimal

Links = Mapping[tuple[str, Key], str]
"""Ids of the conversations that a page shows, by table and conversation."""


@dataclass(frozen=True)
class Said:
    """A turn, counted from 1, of a conversation that led to a failure."""

    number: int
    probe: str
    response: str
    is_failure: bool


@dataclass(frozen=True)
class Example:
    """A conversation up to the turn that stands for a cluster.

    Attributes
    ----------
    turns : list[Said]
        From the first on; the failing turn alone where the others are not stored.
    figures : list of (name, value)
        Of the last turn.
    label : str
        What the conversation is called; empty where it is not known which it is.
    link : str
        Id of the conversation on the page, empty where the page does not show it.
    """

    prompt: str
    turns: list[Said]
    figures: list[tuple[str, str]]
    label: str = ""
    link: str = ""


class Examples:
    """Makes examples of one table's failures.

    Parameters
    ----------
    table : str
        The table that holds the conversations; one that is missing leaves the failing turns alone.
    links : Mapping
        Ids of the conversations that the page shows; see `links_to`.
    """

    def __init__(self, run: RunRecord, table: str, links: Links) -> None:
        self._table, self._threshold, self._links = table, run.threshold, links
        self._paths = Paths(run.tables.get(table, ()))

    def of(self, node: Node, *, is_stored: bool) -> Example:
        """Return the conversation up to a failing turn.

        Parameters
        ----------
        is_stored : bool
            Whether the node is one of the table's; one that a file quotes is looked for in it.
        """
        found = node if is_stored else self._paths.find(node)
        path = [node] if found is None else self._paths.to(found)
        link = "" if found is None else self._links.get((self._table, key_of(found)), "")
        return Example(
            node.prompt,
            [
                Said(
                    one.depth + 1,
                    one.probe,
                    one.response,
                    one is path[-1] or one.is_failure(self._threshold),
                )
                for one in path
            ],
            _figures_of(node if found is None else found),
            "" if found is None else label_of(self._table, found),
            link,
        )


def links_to(tables: Sequence[Table]) -> Links:
    """Return the ids of the conversations that a page shows, by table and conversation."""
    return {
        (table.name, key_of(episode.turns[0].node)): episode.anchor
        for table in tables
        for episode in table.episodes
    }


def _figures_of(node: Node) -> list[tuple[str, str]]:
    figures = {"score": node.response_score, "reward": node.reward, "NLL": node.probe_nll}
    figures["log-probability"] = node.logprob
    return [(name, decimal(value)) for name, value in figures.items() if value is not None]
