from __future__ import annotations

import inspect
import os

# Pydantic looks up the module of every frame of an import if a class has docstrings below its
# fields, and for each frame of the import system this costs a walk through all modules unless it is
# known: three seconds in each test process.
for _name in ("_bootstrap", "_bootstrap_external"):
    inspect.modulesbyfile[os.path.abspath(f"<frozen importlib.{_name}>")] = f"importlib.{_name}"
