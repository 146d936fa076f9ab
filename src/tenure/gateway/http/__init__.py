"""HTTP itself: connections, the routes of the FastAPI application, bodies, API documents."""
