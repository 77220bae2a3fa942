"""Make datasets from SWE-bench rows and from the history of git repositories."""
