"""Another process that wants the same files: `unpacking_program.py FILES CACHE` prints the folder they are in."""

import asyncio
import sys
from pathlib import Path

from carrel.tasks.file_cache import prepared_files
from carrel.tasks.sample import Sample

sample = Sample(sample_id="a", files=Path(sys.argv[1]))
print(asyncio.run(prepared_files(sample, Path(sys.argv[2]))).folder)
