"""How a rank that fails ends all ranks, and what it leaves behind."""
