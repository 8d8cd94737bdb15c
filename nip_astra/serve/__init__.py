"""The local text service: OpenAI's routes for local models, and fine-tuning jobs."""

from nip_astra.lazy import lazy_exports

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "LocalService": "nip_astra.serve.local_service",
        "start_service": "nip_astra.serve.local_service",
    },
)
