"""The conversation as typed objects: `Conversation`, `Message` with parts, `SessionInfo`, and their storage."""
