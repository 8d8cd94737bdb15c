"""nip's names under nip's module paths, mapped to ours: code written for nip runs on our loop.

Replace the root of imports: `from nip.utils.experiments import ...` becomes `from
nip_astra.nip.utils.experiments import ...`. `nip_astra.nip.modules` has the table of names.
"""

from nip_astra.lazy import lazy_modules

__getattr__, __dir__ = lazy_modules(__name__, "nip_astra.nip.modules:MODULES")
