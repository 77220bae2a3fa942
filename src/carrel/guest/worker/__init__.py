"""The program inside: runs code, commands and file requests that come over its line. Standard library only."""
