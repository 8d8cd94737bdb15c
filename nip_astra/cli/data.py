"""Commands that make, fetch and convert data."""

from __future__ import annotations

from typing import Annotated

import typer

from nip_astra.cli.options import Debug

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Make, fetch or convert data of interactive proofs.",
)

Output = Annotated[str, typer.Argument(metavar="OUTPUT", help="File to write, .safetensors.")]


@app.command()
def create(
    output: Output,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Parameter of graph_isomorphism.dataset: --set num_train=1000. Repeatable.",
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Make pairs of graphs and write them to a file."""
    from nip_astra.cli import dataset_commands

    dataset_commands.create(output, overrides or [])


@app.command()
def download(
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME...", help="Of image_classification.dataset, e.g. mnist."),
    ],
    output: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Folder to write to, for machines without a network."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Fetch images from the Hugging Face hub before a run asks for them."""
    from nip_astra.cli import dataset_commands

    dataset_commands.download(names, output=output)


@app.command()
def convert(
    output: Output,
    train: Annotated[str, typer.Option(metavar="FILE", help="A data.pt to train on.")],
    test: Annotated[str, typer.Option(metavar="FILE", help="A data.pt to test on.")],
    debug: Debug = False,
) -> None:
    """Convert pairs of graphs that neural-interactive-proofs published; runs nothing of theirs."""
    from nip_astra.cli import dataset_commands

    dataset_commands.convert(output, train=train, test=test)
