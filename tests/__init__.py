from __future__ import annotations

import inspect
import os

# Pydantic asks for the module of every frame of an import where a class has docstrings under its
# fields, and each of the import system's own costs a walk through all modules unless it is known:
# three seconds in each process of tests.
for _name in ("_bootstrap", "_bootstrap_external"):
    inspect.modulesbyfile[os.path.abspath(f"<frozen importlib.{_name}>")] = f"importlib.{_name}"
