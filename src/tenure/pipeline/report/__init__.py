"""The report: one page with charts, complete in itself, made from the lake alone."""
