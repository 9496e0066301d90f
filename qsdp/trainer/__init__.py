"""`qsdp train` and `qsdp report`: a trainer of causal language models.

A client of qsdp's public names. `command` turns flags into a run, `launch` and `ranks` start and
join the processes, `text`, `tokenizer`, `batches`, `stream` and `data` make batches, `loop` trains,
with `model`, `evaluate`, `checkpoint`, `export` and `metrics`; `report` and `plots` compare runs.

Nothing is imported here, so that `qsdp --help` need not wait for transformers.
"""
