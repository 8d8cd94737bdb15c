"""nip's names under nip's paths, mapped onto ours: code that was written for nip runs on our loop.

Replace the root of imports: `from nip.utils.experiments import ...` becomes
`from nip_astra.nip.utils.experiments import ...`. Which of nip's names is which of ours stands in
`nip_astra.nip.modules`.
"""

from nip_astra.lazy import lazy_modules

__getattr__, __dir__ = lazy_modules(__name__, "nip_astra.nip.modules:MODULES")
