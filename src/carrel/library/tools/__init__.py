"""Things to call: programs, MCP servers, HTTP endpoints, OpenAPI operations, Python functions."""
