"""How benchmarks start processes on hosts and end them."""
