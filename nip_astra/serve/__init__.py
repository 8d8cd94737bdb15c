"""The local text service: OpenAI's routes over models of this machine, and jobs that train them."""

from nip_astra.lazy import lazy_exports

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "LocalService": "nip_astra.serve.local_service",
        "start_service": "nip_astra.serve.local_service",
    },
)
