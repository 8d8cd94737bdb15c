"""The scenario's own modules are beside its data, not in the package."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3] / "scenarios" / "code_validation"))
