"""Pure decisions: standard library only, no I/O, no clock, no prefect."""
