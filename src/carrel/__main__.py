"""`python -m carrel`, the same as `carrel`."""

import sys

from carrel.cli import main

sys.exit(main())
