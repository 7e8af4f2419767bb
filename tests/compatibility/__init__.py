"""Trainings under offload compared with plain Lightning: a table of cases for each part of `docs/compatibility.md`."""
