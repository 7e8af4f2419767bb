"""Commands that make every figure and table of the README and of docs/measured.md."""
