"""What has changed since a run was begun that now goes on."""

from __future__ import annotations

import logging
from pathlib import Path

from nip_astra.errors import RunDirectoryError
from nip_astra.plugins import loaded_plugins
from nip_astra.tracking.environment import changes_of_rounding, describe_environment
from nip_astra.tracking.run_directory import ENVIRONMENT, RunDirectory

logger = logging.getLogger(__name__)


def note_computation(directory: RunDirectory, computed: dict[str, str]) -> None:
    """Write down what computes, and tell what changed since the run was begun.

    Parameters
    ----------
    computed : dict[str, str]
        What the environment does not tell: the `device`, and by what `layers` are computed.
    """
    try:
        before = dict(directory.read_json(ENVIRONMENT))
    except (RunDirectoryError, TypeError, ValueError) as error:
        # Resuming does not need what the run was begun on.
        logger.warning("what the run was begun on cannot be told: %s", error)
        return
    changes = changes_of_rounding(before, describe_environment() | computed)
    if changes:
        logger.warning(
            "the run goes on where it was not begun, so last digits may differ from those of a "
            "run that was not stopped: %s",
            "; ".join(changes),
        )
    # What the run was begun on stays; a run of an older version has not written it down.
    directory.write_json(ENVIRONMENT, computed | before)


def warn_of_changed_plugins(directory: RunDirectory) -> None:
    """Tell which plug-ins are not those that the run was begun with."""
    try:
        recorded = directory.read_json(ENVIRONMENT)["plugins"]
        before = {plugin["spec"]: plugin["sha256"] for plugin in recorded}
        by_name = {Path(spec).name: digest for spec, digest in before.items()}
    except (RunDirectoryError, KeyError, TypeError) as error:
        # Resuming needs no more of that file than this.
        logger.warning("whether plug-ins have changed cannot be told: %s", error)
        return
    for plugin in loaded_plugins():
        # A copy elsewhere has the name of what it stands in for.
        digest = before.get(plugin.spec, by_name.get(Path(plugin.spec).name, plugin.sha256))
        if digest != plugin.sha256:
            logger.warning(
                "the plug-in %s has changed since the run was started; results may differ from "
                "those of a run that was not stopped",
                plugin.spec,
            )
