"""What people see in a browser: pages and /api over any queues that have a ledger and a journal.

`app.py` puts it together and the gateway mounts it. Pages are rendered on the server with Jinja.
"""
