"""One file a command; each offers `command`. `leasehold.cli.group` lists and loads them."""
