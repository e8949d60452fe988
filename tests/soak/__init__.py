"""Soak tests: one fault, thousands of times. `python -m tests.soak NAME --times N`.

Each module of this folder has a function `soak(times, seed)` that yields one `Outcome` per try.
The ordinary tests run a few tries of each.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # the helpers of the tests, as in pytest
