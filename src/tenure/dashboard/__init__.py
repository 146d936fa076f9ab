"""The dashboard: pages and /api over all queues. It knows no contract.

`app` declares the routes, which the gateway mounts. Pages are rendered on the server with Jinja.
"""
