"""Commands of ``tileweave``: ``app.py`` parses and delegates; each other file is one command."""
