"""The web page: what sessions did, for people. Jinja2 on the server; nothing comes from outside."""
