"""How a training goes on when ranks are lost: `python -m bench.elastic`."""
