"""`python -m carrel.cli`, the same as `carrel`."""

import sys

from carrel.cli import main

sys.exit(main())
