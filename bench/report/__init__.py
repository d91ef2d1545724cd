"""From rounds to figures, tables and pages."""
