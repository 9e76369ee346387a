"""A package only so that `python -m benchmarks` means this folder: Opacus installs one of the same name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))   # bench files and helpers know each other by plain names
