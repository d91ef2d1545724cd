"""Horovod's API on hvpipe: a script moves by `import hvpipe.horovod.tensorflow as hvd`.

A layer of names over `hvpipe.keras`. docs/from-horovod.md says what differs.
"""
