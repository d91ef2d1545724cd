"""What the ranks of tests/test_many_ranks.py do: collectives, and counting the messages of an agreement."""

import numpy as np

import hvpipe
from hvpipe.session import current


def main() -> None:
    hvpipe.init()
    size, rank = hvpipe.size(), hvpipe.rank()
    native = current().engine.native
    assert native.hosts == 8
    for elements in (1, 700, 5_000, 20_000):  # small ones, and those of which each rank sends a slice
        here = np.arange(elements, dtype=np.float32) % 11 + rank
        wanted = size * (np.arange(elements) % 11) + size * (size - 1) // 2
        total = hvpipe.allreduce(here, op="sum", out=np.empty_like(here))
        np.testing.assert_array_equal(total, wanted)
        np.testing.assert_array_equal(hvpipe.allreduce(here, op="sum", out=here), wanted)
    parts = hvpipe.allgather(np.full((rank % 3, 2), rank))
    np.testing.assert_array_equal(parts[:, 0], np.repeat(np.arange(size), np.arange(size) % 3))
    assert hvpipe.broadcast_object({"from": rank}, root_rank=size - 1) == {"from": size - 1}
    before = native.counters()["messages_sent"]
    hvpipe.barrier()
    told = native.counters()["messages_sent"] - before
    assert told == 6, f"wanted: an agreement with log2(64) messages a rank. Received: {told}"
    if rank == 0:
        print("all ranks have passed", flush=True)


if __name__ == "__main__":
    main()
