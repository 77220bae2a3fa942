"""The requests and answers of the HTTP API: each model once, for server, client and tasks."""
