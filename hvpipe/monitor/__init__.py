"""What a rank and its host are doing: processor, memory, GPU, and the status that `hvpipe top` shows."""
