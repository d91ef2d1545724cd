"""The ranks: how MPI or TCP joins them, and what they tell each other before they have an engine."""
