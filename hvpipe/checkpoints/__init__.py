"""The files of checkpoints: written whole or not at all, checked before they are used. No framework."""
