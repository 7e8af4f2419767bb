"""What trains under offload as it does under plain Lightning: one table of cases a page of `docs/compatibility.md`."""
