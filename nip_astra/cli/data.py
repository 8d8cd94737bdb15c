"""Commands that create, download and convert data."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nip_astra.cli.options import option, shared_options
from nip_astra.errors import ConfigurationError, counted

if TYPE_CHECKING:
    from nip_astra.scenarios.graphs.generation import GraphPairs

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Make, fetch or convert data of interactive proofs.",
)

Output = Annotated[str, typer.Argument(metavar="OUTPUT", help="File to write, .safetensors.")]


@app.command()
@shared_options()
def create(
    options: Mapping[str, Any],
    output: Output,
    overrides: Annotated[
        list[str] | None,
        option(
            "NAME=VALUE",
            "Parameter of graph_isomorphism.dataset: --set num_train=1000. Repeatable.",
            "--set",
        ),
    ] = None,
) -> None:
    """Generate pairs of graphs and write them to a file."""
    from nip_astra.parameters.files import parse_overrides
    from nip_astra.progress import showing
    from nip_astra.scenarios.graphs.generation import SPLITS, GraphPairParameters, generate_pairs

    path = _new_file(output)
    parameters = GraphPairParameters.from_dict(parse_overrides(overrides or []).values)
    if parameters.file is not None:
        raise ConfigurationError(
            "`file` names existing pairs of graphs, but this command generates pairs. Leave it out."
        )
    with showing("Generating", len(SPLITS)) as bar:
        pairs_by_split = {}
        for split in SPLITS:
            pairs_by_split[split] = generate_pairs(parameters, split)
            bar.step()
    _save(path, **pairs_by_split)


@app.command()
@shared_options()
def download(
    options: Mapping[str, Any],
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME...", help="Of image_classification.dataset, e.g. mnist."),
    ],
    output: Annotated[
        str | None, option("DIR", "Folder to write to, for machines without a network.")
    ] = None,
) -> None:
    """Download images from the Hugging Face hub before a run needs them."""
    from nip_astra.progress import showing
    from nip_astra.scenarios.images.data import download_images

    for name in names:
        folder = None if output is None else _new_file(str(Path(output) / name))
        with showing(f"Downloading {name}"):
            sizes = download_images(name, folder)
        counts = ", ".join(f"{size} {split}" for split, size in sizes.items())
        sys.stdout.write(f"{name:<10} {counts}\n")
        if folder is not None:
            sys.stdout.write(f"use it by  --set image_classification.dataset.name={name} ")
            sys.stdout.write(f"--set image_classification.dataset.path={folder}\n")


@app.command()
@shared_options()
def convert(
    options: Mapping[str, Any],
    output: Output,
    train: Annotated[str, option("FILE", "A data.pt to train on.")],
    test: Annotated[str, option("FILE", "A data.pt to test on.")],
) -> None:
    """Convert pairs of graphs published by neural-interactive-proofs, without executing code."""
    import numpy as np

    from nip_astra.progress import showing
    from nip_astra.scenarios.graphs.generation import pair_hashes
    from nip_astra.scenarios.graphs.pair_files import padded_to, read_published_pairs

    path = _new_file(output)
    with showing("Converting"):
        published = [read_published_pairs(file) for file in (train, test)]
    for file, split in zip((train, test), published, strict=True):
        if split.num_rescored:
            sys.stdout.write(
                f"rescored   {counted(split.num_rescored, 'pair')} of {file}; labels stay\n"
            )
    num_nodes = max(split.pairs.adjacency.shape[-1] for split in published)
    train_pairs, test_pairs = (padded_to(split.pairs, num_nodes) for split in published)
    num_shared = int(np.isin(pair_hashes(test_pairs), pair_hashes(train_pairs)).sum())
    if num_shared:
        sys.stdout.write(
            f"warning    {num_shared} of {counted(test_pairs.num_pairs, 'pair')} to test on are "
            "among those to train on, up to the order of nodes, or look like such\n"
        )
    _save(path, train_pairs, test_pairs)


def _new_file(output: str) -> Path:
    path = Path(output).expanduser()
    if path.exists():
        raise ConfigurationError(f"{path} exists already. Choose another path, or remove it first.")
    return path


def _save(path: Path, train: GraphPairs, test: GraphPairs) -> None:
    from nip_astra.scenarios.graphs.generation import SPLITS
    from nip_astra.scenarios.graphs.pair_files import save_pairs
    from nip_astra.scenarios.graphs.wl import ISOMORPHIC

    save_pairs(path, train=train, test=test)
    for split, pairs in zip(SPLITS, (train, test), strict=True):
        share = float((pairs.wl_score == ISOMORPHIC).mean())
        pairs_shown = counted(pairs.num_pairs, "pair")
        sys.stdout.write(f"{split:<10} {pairs_shown}, {100 * share:.0f} % isomorphic\n")
    sys.stdout.write(f"use it by  --set graph_isomorphism.dataset.file={path.resolve()}\n")
