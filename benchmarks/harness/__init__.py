"""The benchmark harness: private server, peers in their own environments, rounds, reports."""
