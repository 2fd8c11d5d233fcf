"""The device that tests of engines, publishers and collectives run on, where they can choose: a CPU, unless
deploy/gpu/run says another.
"""

from __future__ import annotations

import os

DEVICE = os.environ.get("ROLLFAB_TEST_DEVICE", "cpu")
