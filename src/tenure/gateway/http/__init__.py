"""HTTP itself: connections, dispatch of requests to endpoints, and the API documents.

A web framework would replace this package. The rest of the gateway depends on it only in `app`,
`server` and `operations`.
"""
