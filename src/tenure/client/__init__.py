"""The caller's side of every contract: submit jobs, await their results, follow their events.

Start at `client.client`. It opens queues by URL and imports no contract.
"""
