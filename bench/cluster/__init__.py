"""A virtual cluster on one machine: its hosts are network namespaces with limited links and CPU time."""
