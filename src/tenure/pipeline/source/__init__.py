"""Queue URLs as a Spark data source: journals in ranges, jobs as rows, rows as jobs."""
