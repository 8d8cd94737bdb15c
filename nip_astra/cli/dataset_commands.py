"""What `nip-astra dataset` does; imported when it runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from nip_astra.errors import ConfigurationError
from nip_astra.scenarios.graphs.generation import (
    SPLITS,
    GraphPairParameters,
    GraphPairs,
    generate_pairs,
    pair_hashes,
)
from nip_astra.scenarios.graphs.pairs_file import save_pairs
from nip_astra.scenarios.graphs.published_pairs import padded_to, read_published_pairs
from nip_astra.scenarios.graphs.wl import ISOMORPHIC
from nip_astra.scenarios.images.hub import download_images


def create(output: str, overrides: Sequence[str]) -> None:
    """Make pairs of graphs and write them to a file."""
    path = _new_file(output)
    try:
        given = OmegaConf.to_container(OmegaConf.from_dotlist(list(overrides)), resolve=True)
    except (OmegaConfBaseException, YAMLError, ValueError) as error:
        raise ConfigurationError(
            f"pairs of graphs were to be made with {' '.join(overrides)!r}, but a value cannot be "
            f"read: {str(error).splitlines()[0]}. Give "
            "--set name=value, for instance --set num_train=1000."
        ) from error
    assert isinstance(given, dict)
    parameters = GraphPairParameters.from_dict({str(name): value for name, value in given.items()})
    if parameters.file is not None:
        raise ConfigurationError(
            "pairs of graphs were to be made, but `file` names some that are there. Leave it out."
        )
    train, test = (generate_pairs(parameters, split) for split in SPLITS)
    _save(path, train, test)


def convert(output: str, *, train: str, test: str) -> None:
    """Write published pairs of graphs as this project reads them."""
    path = _new_file(output)
    read = [read_published_pairs(file) for file in (train, test)]
    n = max(one.pairs.adjacency.shape[-1] for one in read)
    for file, one in zip((train, test), read, strict=True):
        if one.num_rescored:
            sys.stdout.write(f"rescored   {one.num_rescored} pairs of {file}; labels stay\n")
    pairs = [padded_to(one.pairs, n) for one in read]
    num_known = int(np.isin(pair_hashes(pairs[1]), pair_hashes(pairs[0])).sum())
    if num_known:
        sys.stdout.write(
            f"warning    {num_known} of {pairs[1].num_pairs} pairs to test on are among those to "
            "train on, up to the order of nodes, or look like such\n"
        )
    _save(path, *pairs)


def download(names: Sequence[str], *, output: str | None) -> None:
    """Fetch images from the hub, to the library's cache or to a folder."""
    for name in names:
        folder = None if output is None else _new_file(str(Path(output) / name))
        sizes = download_images(name, folder)
        told = ", ".join(f"{size} {split}" for split, size in sizes.items())
        sys.stdout.write(f"{name:<10} {told}\n")
        if folder is not None:
            sys.stdout.write(f"use it by  --set image_classification.dataset.name={name} ")
            sys.stdout.write(f"--set image_classification.dataset.path={folder}\n")


def _new_file(output: str) -> Path:
    path = Path(output).expanduser()
    if path.exists():
        raise ConfigurationError(
            f"data were to be written to {path}, but that exists. Choose another path, or remove "
            "it first."
        )
    return path


def _save(path: Path, train: GraphPairs, test: GraphPairs) -> None:
    save_pairs(path, train=train, test=test)
    for split, pairs in zip(SPLITS, (train, test), strict=True):
        share = float((pairs.wl_score == ISOMORPHIC).mean())
        sys.stdout.write(f"{split:<10} {pairs.num_pairs} pairs, {100 * share:.0f} % isomorphic\n")
    sys.stdout.write(f"use it by  --set graph_isomorphism.dataset.file={path.resolve()}\n")
