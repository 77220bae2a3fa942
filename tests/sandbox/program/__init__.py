"""The program that the sandbox tests run inside: it executes what it is sent and tells what came of it."""
