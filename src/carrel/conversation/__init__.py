"""What was said: messages, the log they are kept in, and how it is read again."""
