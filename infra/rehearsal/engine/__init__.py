"""Stands in for an SGLang 0.5.23 server on a machine without GPUs.

Started with the very argument list of ``python -m sglang.launch_server``: ``python -m infra.rehearsal.engine ...``.
What is real here: the option table and argparse's strictness, the checks on the checkpoint's files, the group of
processes that lives and dies together, the HTTP API, the prefill/decode hand-over per bootstrap room, the names of
the metrics. What is simulated: every computation. Time and rates come from ``performance.yaml``.
"""

ENGINE_VERSION = "0.5.23"

BANNER = "SIMULATED ENGINE: no GPU, no weights in memory; parses SGLang 0.5.23 arguments"
