"""What people see in a browser: pages over any queues that have a ledger and a journal.

`site.py` puts it together; the gateway mounts it. `search.py` is the language of the search box,
`finding.py` runs it over ledgers, `observing.py` watches journals for figures and news, `acting.py`
steers and writes down who did. Pages are made on the server; the browser gets no build artefacts.
"""
