"""Print the bash blocks of the README's Quick start, each ended by a NUL, so that CI runs what the README says."""

import re
import sys
from pathlib import Path

readme = Path(__file__).parent.parent.joinpath("README.md").read_text(encoding="utf-8")
section = re.search(r"^## Quick start\n(.*?)(?=^## )", readme, re.DOTALL | re.MULTILINE)
blocks = re.findall(r"^```bash\n(.*?)^```$", section.group(1) if section else "", re.DOTALL | re.MULTILINE)
sys.stdout.write("".join(block + "\0" for block in blocks))
