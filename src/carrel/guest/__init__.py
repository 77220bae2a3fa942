"""Everything that runs inside a sandbox: the worker and what builds the sandbox. Standard library only."""
