"""NexRL's names under NexRL's module paths, mapped to ours: its trainers run on our loop.

Replace the root of imports: `from nexrl.trainer import ...` becomes `from nip_astra.nexrl.trainer
import ...`. `nip_astra.nexrl.modules` has the table of names.
"""

from nip_astra.lazy import lazy_modules

__getattr__, __dir__ = lazy_modules(__name__, "nip_astra.nexrl.modules:MODULES")
