"""What ``action.yml`` runs: ``cudaforge_action`` as it is installed, never a module that lies in the checkout.

``python -m`` would look into the checkout first; a script's own folder is looked into first, which is wrong here too.
With the argument ``handover`` only the names of artifacts are worked out.
"""

from __future__ import annotations

import os
import sys

if sys.path and os.path.abspath(sys.path[0]) == os.path.dirname(os.path.abspath(__file__)):
    del sys.path[0]
sys.path[:] = [entry for entry in sys.path if entry]

if sys.argv[1:] == ["handover"]:
    from cudaforge_action.handover import main
else:
    from cudaforge_action.__main__ import main

sys.exit(main())
