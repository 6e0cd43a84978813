"""What ``action.yml`` runs: ``cudaforge_action`` as it is installed, never a module that lies in the checkout.

``python -m`` would put the checkout's folder first on ``sys.path``, a script puts its own there; both go.
"""

from __future__ import annotations

import os
import sys

here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [entry for entry in sys.path if entry and os.path.abspath(entry) not in (here, os.getcwd())]

from cudaforge_action.__main__ import main  # noqa: E402

sys.exit(main())
