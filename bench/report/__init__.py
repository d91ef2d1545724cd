"""From recorded rounds to figures, tables, plots and pages."""
