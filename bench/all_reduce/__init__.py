"""All-reduce bandwidth: hvpipe against MPI_Allreduce, a plain copy and the link."""
