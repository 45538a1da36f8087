"""`python -m pagedserve.cli`, for where the script is not on PATH."""

from __future__ import annotations

import sys

from pagedserve.cli import main

sys.exit(main())
