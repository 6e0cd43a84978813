"""``python -m pytest_cudaforge.hardware DEVICE``: the facts of one device as JSON on stdout.

The child behind :func:`pytest_cudaforge.hardware.detect_in_child`; useful by hand as well.
"""

from __future__ import annotations

import json
import sys

from pytest_cudaforge.errors import DeviceError
from pytest_cudaforge.facts import to_json
from pytest_cudaforge.hardware import detect


def main(argv: list[str]) -> int:
    """Print ``{"facts": ...}`` or ``{"error": ..., "expected": ..., "remedy": ...}``; status 0 or 2."""
    device = argv[1] if len(argv) > 1 else "cpu"
    try:
        print(json.dumps({"facts": to_json(detect(device))}))
    except DeviceError as error:
        print(json.dumps({"error": error.what, "expected": error.expected, "remedy": error.remedy}))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
