"""Fill the section about failures: clusters of evaluations, and groups by wording."""

from __future__ import annotations

from collections.abc import Sequence

from nip_astra.report import evaluations
from nip_astra.report.conversations import Table
from nip_astra.report.examples import Example, Examples, Links, links_to
from nip_astra.report.failure_groups import MAX_MEMBERS, GroupedFailures
from nip_astra.report.labels import MAX_CLUSTERS
from nip_astra.report.records import Node, RunRecord, mapping, node_of
from nip_astra.report.spec import Context


def failures(
    run: RunRecord,
    grouped: GroupedFailures | None,
    tables: Sequence[Table],
    anchor: str,
) -> Context | None:
    """Return what the section shows; None where no response has a verdict.

    Parameters
    ----------
    tables : Sequence[Table]
        Conversations of the page, which examples link to.
    anchor : str
        Id of the section of conversations.
    """
    links = links_to(tables)
    clustered: list[Context] = []
    first = 0
    for name, evaluation in run.evaluations.items():
        found = evaluations.clusters_of(evaluation)[:MAX_CLUSTERS]
        if found:
            examples = Examples(run, f"evaluations/{name}", links)
            clustered.append(_clustered(name, evaluation, found, examples, first))
        first += len(found)
    if grouped is None and not clustered:
        return None
    groups = grouped.groups if grouped else []
    small = groups[MAX_CLUSTERS:]
    return {
        "clustered": clustered,
        "grouped": grouped if groups else None,
        "shown": _shown_groups(run, grouped, links, first),
        "anchor": anchor,
        "place": "" if anchor == "conversations" else f"{anchor}-",
        "has_filter": bool(tables),
        "num_small": len(small),
        "num_in_small": sum(group.size for group in small),
    }


def _clustered(
    name: str,
    evaluation: Context,
    clusters: Sequence[evaluations.Cluster],
    examples: Examples,
    first: int,
) -> Context:
    """Return what is shown of an evaluation's clusters; the first has the number `first`."""
    likeliest = mapping(evaluation.get("most_likely_failure"))

    def shown(node: Node | None) -> Example | None:
        return None if node is None else examples.of(node, is_stored=False)

    return {
        "title": f"Evaluation {name}",
        "groups": [
            {
                "size": cluster.size,
                "share": cluster.share,
                "plants": cluster.plants,
                "most_likely": shown(cluster.most_likely),
                "medoid": shown(cluster.medoid),
                "shortest": shown(cluster.shortest),
                "number": number,
            }
            for number, cluster in enumerate(clusters, start=first)
        ],
        "likeliest": shown(node_of(likeliest)) if likeliest else None,
    }


def _shown_groups(
    run: RunRecord, grouped: GroupedFailures | None, links: Links, first: int
) -> list[Context]:
    if grouped is None:
        return []
    examples = Examples(run, grouped.table, links)
    return [
        {
            "size": group.size,
            "members": group.members,
            "example": examples.of(group.most_likely, is_stored=True),
            "others": group.members[1 : MAX_MEMBERS + 1],
            "number": number,
        }
        for number, group in enumerate(grouped.groups[:MAX_CLUSTERS], start=first)
    ]
