"""The report: one self-contained page with charts, made from the lake."""
