"""One file a command; each offers `command`. `tenure.cli.group` lists and loads them."""
