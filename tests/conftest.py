"""Settings that must stand before any test module is imported."""

import os
from pathlib import Path

# Triton reads this when it is imported. Looking for the driver's device is cheaper than importing torch here.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
