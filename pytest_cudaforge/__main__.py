"""``python -m pytest_cudaforge`` is ``cudaforge``."""

import sys

from pytest_cudaforge.cli import main

sys.exit(main())
