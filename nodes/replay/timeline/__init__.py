"""Recordings as one page with a timeline that can be zoomed."""
