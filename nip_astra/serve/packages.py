"""What the service is made of beside the package's own requirements."""

from __future__ import annotations

from nip_astra.errors import MissingDependencyError


def require_packages() -> None:
    """Refuse to start without what the service is made of.

    Raises
    ------
    MissingDependencyError
        With how to install it.
    """
    try:
        import fastapi  # noqa: F401 - the routes
        import python_multipart  # noqa: F401 - reads uploads
        import uvicorn  # noqa: F401 - speaks HTTP
    except ImportError as error:
        raise MissingDependencyError(
            f"a text service was to be started, and it needs the package {error.name}. Install it "
            "with: pip install 'nip_astra[serve]'."
        ) from error
