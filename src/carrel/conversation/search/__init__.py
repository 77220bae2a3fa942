"""Search over the messages of all sessions, by words and by meaning."""
